"""Names of the cache. transformers 5.24 calls it `cache`, in arguments and in outputs; before, it is `past_key_values`.

A call takes either name with any version, and its output has both. A model is called as transformers calls it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.errors import InvalidArgumentError

BOTH_NAMES = ("cache", "past_key_values")

CACHE = next(name for name in BOTH_NAMES if name in {field.name for field in fields(GenerateDecoderOnlyOutput)})
"""The name that the installed transformers uses."""

_OTHER_NAMES = ("cache_params", "state")
"""Names in classes that do not follow it: Mamba's before 5.24, and RWKV's."""

CACHE_ARGUMENTS = (*BOTH_NAMES, *_OTHER_NAMES)
"""All names of the cache argument of a forward pass."""


def cache_name(model: PreTrainedModel) -> str:
    """The argument that transformers passes the cache in to the forward pass of `model`."""
    arguments = forward_arguments(model)
    return next((name for name in (CACHE, *_OTHER_NAMES) if name in arguments), CACHE)


def rename_cache(kwargs: dict[str, Any]) -> None:
    """Give the cache in the arguments of a call the name that the installed transformers uses.

    Raises:
        InvalidArgumentError: Both names are given.
    """
    other = next(name for name in BOTH_NAMES if name != CACHE)
    cache = kwargs.pop(other, None)
    if cache is None:
        return
    if kwargs.get(CACHE) is not None:
        raise InvalidArgumentError("cache and past_key_values are two names of the same cache; pass one of them")
    kwargs[CACHE] = cache


class EitherCacheName:
    """An output of `generate` with its cache under both names."""

    cache: Any
    past_key_values: Any

    if not TYPE_CHECKING:  # to type checkers each name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for attributes that the installed transformers does not know."""
            if name in BOTH_NAMES and name != CACHE:
                return getattr(self, CACHE)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def knows_its_length(cache: Any) -> bool:
    """Whether a cache knows the length of its text. A cache with only running states does not."""
    linear = getattr(cache, "is_linear", ())
    return not linear or not all(linear)


def has_own_code(cache: Any) -> bool:
    """Whether a cache or one of its layers has methods that are not of transformers, which steps would not call."""
    parts = [cache, *getattr(cache, "layers", ())]
    kinds = [*map(type, parts), getattr(cache, "layer_class_to_replicate", None) or type(cache)]
    return not all(kind.__module__.startswith("transformers") for kind in kinds) or any(
        callable(getattr(type(part), name, None)) for part in parts for name in vars(part)
    )
