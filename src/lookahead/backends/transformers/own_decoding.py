"""Whether a model decodes by the loop of transformers, whose place ours takes."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

_OF_DECODING = frozenset(name for name, value in vars(GenerationMixin).items() if callable(value)) - {"generate"}
"""Methods by which transformers prepares and decodes a text, inside of `generate`."""


def own_method(model: PreTrainedModel) -> str | None:
    """The name of a method that decodes otherwise than transformers: one that was put on this object in place of its
    class's, or a loop of its class. `None` if there is none.

    Other methods of a class, such as the one that prepares inputs, are no matter of names: a miniature tries them.
    """
    put = sorted(vars(model).keys() & _OF_DECODING)
    has_loop = getattr(type(model), "_sample", None) is not GenerationMixin._sample
    return next(iter(put), "_sample" if has_loop else None)


def given_generate(model: Any) -> Any:
    """The `generate` that was put on this object in place of its class's, unless it leads to this library: `attach`, or
    a repository that calls it. `None` if there is none."""
    method = vars(model).get("generate")
    function = unwrap(getattr(method, "func", method)) if method is not None else None
    named = getattr(getattr(function, "__code__", None), "co_names", ())
    is_ours = "lookahead" in (*named, getattr(function, "__module__", "").partition(".")[0])
    return None if is_ours else method
