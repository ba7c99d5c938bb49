"""The cache of a model with running states: transformers' own, with a way back to where it was before a pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.saved_state import SavedState
from lookahead.errors import UnsupportedArgumentError

_NAMES = ("past_key_values", "cache_params", "state")
"""What models call their caches."""


class ChainCache:
    """What plain decoding of a model would decode with, the tokens in it counted.

    Args:
        model: The model that it belongs to.
        content: A cache that is filled already; an empty one if not given.

    Attributes:
        name: What the model calls its cache.
        content: The cache as the model takes it; `None` before the first pass of a model that makes its own.
        length: Tokens in it.
        copied_bytes: Bytes of states that `save` copied so far.
    """

    def __init__(self, model: PreTrainedModel, content: Cache | None = None) -> None:
        self.name = cache_name(model)
        self.content: Any = empty_cache(model) if content is None else content
        self.length = 0 if content is None else content.get_seq_length()
        self.copied_bytes = 0
        self._buffers: list[torch.Tensor] = []
        self._saved: SavedState | None = None

    def arguments(self) -> dict[str, Any]:
        """What a pass takes of it."""
        return {} if self.content is None else {self.name: self.content}

    def save(self) -> None:
        """Remember the cache as it is; the copies are taken into the buffers of the last time."""
        self._saved = SavedState(self.content, self._buffers)
        self.copied_bytes += self._saved.copied_bytes

    def restore(self) -> None:
        """Put back what the last `save` found, once."""
        assert self._saved is not None
        self._saved.restore()
        self._saved = None

    def keep(self, outputs: Any) -> None:
        """Take the cache from what the first pass gave, if the model makes its own."""
        if self.content is None:
            self.content = outputs[self.name]


def has_running_state(kind: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a model of class `kind` keeps something else of the text than keys and values of each token."""
    if getattr(kind, "_is_stateful", False):
        return True
    if not kind._supports_default_dynamic_cache():
        return any(name in inspect.signature(kind.forward).parameters for name in _NAMES)
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (AttributeError, ValueError):  # such as of BLT, whose configuration says nothing of layers
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def check_states(model: PreTrainedModel, cache: Cache) -> None:
    """Refuse a cache that decoding of `model` cannot go on with.

    Raises:
        UnsupportedArgumentError: It has no room for the model's states, or they are elsewhere.
    """
    expected = empty_cache(model)
    layers = [] if expected is None else [type(layer) for layer in expected.layers]
    if not layers or cache.offloading or [type(layer) for layer in cache.layers] != layers:
        raise UnsupportedArgumentError(
            f"past_key_values={type(cache).__name__} is not supported for {type(model).__name__}, which keeps a "
            "running state; pass DynamicCache(config=model.config), the cache that an earlier call returned, or none"
        )


def cache_name(model: PreTrainedModel) -> str:
    """What `model` calls its cache in its forward pass."""
    arguments = forward_arguments(model)
    return next((name for name in _NAMES if name in arguments), _NAMES[0])


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """The cache that transformers begins with; `None` where the model makes it in its first pass."""
    if not model._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))
