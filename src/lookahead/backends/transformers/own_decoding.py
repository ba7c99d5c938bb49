"""Models with a decoding loop other than transformers' own, which lookahead decoding replaces."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

_OF_DECODING = frozenset(name for name, value in vars(GenerationMixin).items() if callable(value)) - {"generate"}
"""Methods that transformers calls in `generate` to prepare and decode a text."""


def own_method(model: PreTrainedModel) -> str | None:
    """Return the name of a decoding method of this object, or a decoding loop of its class; `None` if there is none.

    Other methods, for example to prepare inputs, may differ: a miniature tries them.
    """
    replaced = sorted(vars(model).keys() & _OF_DECODING)
    has_loop = getattr(type(model), "_sample", None) is not GenerationMixin._sample
    return next(iter(replaced), "_sample" if has_loop else None)


def own_generate(model: Any) -> Any:
    """Return the `generate` of this object that replaces its class's; `None` if it leads to this library.

    `attach` sets one, and so do repositories that call this library.
    """
    method = vars(model).get("generate")
    function = unwrap(getattr(method, "func", method)) if method is not None else None
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    is_ours = "lookahead" in (*names, getattr(function, "__module__", "").partition(".")[0])
    return None if is_ours else method
