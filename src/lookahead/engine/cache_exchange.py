"""Caches that callers bring along and take away."""

from __future__ import annotations

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from lookahead.engine.tree_cache import TreeCache, TreeLayer
from lookahead.errors import UnsupportedArgumentError


def adopt_cache(cache: Cache) -> TreeCache:
    """The tree cache that decoding goes on with: `cache` itself, or a copy of what a `DynamicCache` holds.

    Raises:
        UnsupportedArgumentError: The cache is of another kind.
    """
    if isinstance(cache, TreeCache):
        cache.settle()
        return cache
    layers = cache.layers
    # Empty caches of the kind that makes its layers as the model comes to them have none yet.
    if (
        not isinstance(cache, DynamicCache)
        or cache.offloading
        or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in layers)
    ):
        raise UnsupportedArgumentError(
            f"past_key_values={type(cache).__name__} is not supported by lookahead decoding; pass a DynamicCache, the "
            "cache that an earlier call returned, or none"
        )
    adopted = TreeCache()
    if cache.get_seq_length() > 0:
        adopted.layers = [_adopt_layer(layer) for layer in layers]
    return adopted


def return_cache(decoded: TreeCache, cache: Cache) -> None:
    """Put what decoding added into the `DynamicCache` that the caller passed, as transformers would have."""
    if isinstance(cache, TreeCache):
        return
    while len(cache.layers) < len(decoded.layers):
        cache.layers.append(DynamicLayer())
    # Layers that borrow the states of others hold nothing, and decoding may not have come to them.
    for layer, own in zip(cache.layers, decoded.layers, strict=False):
        if not own.is_initialized:
            continue
        if not layer.is_initialized:
            layer.lazy_initialization(own.keys, own.values)
        start, end = 0, own.longest
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = end
            start = max(0, end - layer.sliding_window + 1)
        layer.keys, layer.values = own.keys[:, :, start:end].clone(), own.values[:, :, start:end].clone()


def _adopt_layer(layer: DynamicLayer | DummyLayer) -> TreeLayer:
    own = TreeLayer()
    if isinstance(layer, DummyLayer) or not layer.is_initialized:
        return own
    own.lazy_initialization(layer.keys, layer.values)
    length = layer.get_seq_length()
    # A sliding layer has dropped what no later token can see; the mask hides the zeros in its place.
    missing = length - layer.keys.shape[2]
    own.keys, own.values = (
        torch.nn.functional.pad(states, (0, 0, missing, 0)) for states in (layer.keys, layer.values)
    )
    own.lengths = [length] * layer.keys.shape[0]
    return own
