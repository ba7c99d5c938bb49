"""Caches that callers bring along and take away."""

from __future__ import annotations

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from lookahead.backends.transformers.static_cache import StaticTreeCache
from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

_BLANK = 2.0**-7
"""What fills the columns of hidden tokens: finite, as attention multiplies it by 0, and known again by its looks."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)

_EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""Layers that never hold states; from transformers 5.20 on."""


def adopt_cache(cache: Cache, mask: torch.Tensor) -> TreeCache:
    """The tree cache to decode with, which begins with what `cache` holds and leaves that as it is.

    A cache of transformers has a column for every input token, hidden ones included; decoding goes on
    with the tokens that count, each row contiguous from its start.

    Args:
        cache: What the caller passed, or what the model made of a prompt.
        mask: Which tokens of the whole text count, `[batch, columns]` bool; the cache holds the first columns.

    Raises:
        InvalidArgumentError: The cache has other rows than the mask, or the mask shows tokens that it was made without.
        UnsupportedArgumentError: The cache is of another kind.
    """
    # Empty caches of the kind that makes its layers as the model comes to them have none yet.
    if (
        not isinstance(cache, DynamicCache)
        or cache.offloading
        or any(type(layer) not in (*_LAYERS, *_EMPTY_LAYERS) for layer in cache.layers)
    ):
        raise UnsupportedArgumentError(
            f"past_key_values={type(cache).__name__} is not supported by lookahead decoding; pass a DynamicCache, the "
            "cache that an earlier call returned, or none"
        )
    length = cache.get_seq_length()
    if length == 0:
        return TreeCache([_window(layer) for layer in cache.layers])
    held = mask[:, :length].cpu()
    filled = [layer for layer in cache.layers if layer.is_initialized and not isinstance(layer, _EMPTY_LAYERS)]
    if len(held) != filled[0].keys.shape[0]:
        raise InvalidArgumentError(
            f"past_key_values holds {filled[0].keys.shape[0]} rows, but input_ids has {len(held)}; they must be the "
            "same texts"
        )
    _check_states(filled[0].keys, held)
    adopted = TreeCache([_window(layer) for layer in cache.layers])
    adopted.layers = [_adopt_layer(layer) for layer in cache.layers]
    return adopted if bool(held.all()) else _without_hidden(adopted, held)


def return_cache(decoded: TreeCache, cache: Cache, mask: torch.Tensor) -> Cache:
    """The cache that the caller gets: `cache` with what decoding added, as transformers would have left it.

    Args:
        decoded: What was decoded, and is used no more; the buffers of a static one are.
        cache: What the caller passed, or an empty one.
        mask: Which tokens of the text that was handed over count, `[batch, columns]` bool; later ones all do.
    """
    if not bool(mask.all()):
        decoded = _with_hidden(decoded, mask.cpu())
    while len(cache.layers) < len(decoded.layers):
        picks = decoded.layers[len(cache.layers)].indexer is not None
        cache.layers.append(DynamicIndexedLayer() if picks else DynamicLayer())
    # Layers that borrow the states of others hold nothing, and decoding may not have come to them.
    for layer, states in zip(cache.layers, decoded.layers, strict=False):
        if not states.is_initialized:
            continue
        if not layer.is_initialized:
            layer.lazy_initialization(states.keys, states.values)
        start, end = 0, states.longest
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = end
            start = max(0, end - layer.sliding_window + 1)
        start, end = start - states.dropped, end - states.dropped
        rows = len(states.lengths)
        layer.keys, layer.values = states.keys[:rows, :, start:end], states.values[:rows, :, start:end]
        if isinstance(decoded, StaticTreeCache):
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        if states.indexer is not None and isinstance(layer, DynamicIndexedLayer):
            layer.lazy_initialization_indexer(states.indexer.keys)
            layer.indexer_keys = states.indexer.keys[:, 0, :end]
    return cache


def _check_states(keys: torch.Tensor, held: torch.Tensor) -> None:
    """Refuse a mask that shows what was hidden when the cache was filled; keys `[batch, heads, columns, size]`."""
    columns = keys.shape[2]
    if bool(((keys[:, 0] == _BLANK).all(dim=-1).cpu() & held[:, -columns:]).any()):
        raise InvalidArgumentError(
            "attention_mask shows tokens that it hid when past_key_values was filled, so the cache lacks them; pass "
            "the mask of the call before, longer by what has come since"
        )


def _without_hidden(cache: TreeCache, held: torch.Tensor) -> TreeCache:
    """A copy with the columns that count alone, `held` `[batch, columns]` bool, each row contiguous from its start."""
    sources = [mine.nonzero()[:, 0] for mine in held]
    # Attention multiplies what lies behind the end of a row by 0, so it must be finite.
    return _moved(cache, sources, [torch.arange(len(places)) for places in sources], fill=0.0)


def _with_hidden(cache: TreeCache, mask: torch.Tensor) -> TreeCache:
    """A copy with a column for each hidden token as well, `mask` `[batch, columns]` bool."""
    lengths = cache.lengths(len(mask))
    targets = [_columns(mine, length) for mine, length in zip(mask, lengths, strict=True)]
    return _moved(cache, [torch.arange(len(places)) for places in targets], targets, fill=_BLANK)


def _moved(cache: TreeCache, sources: list[torch.Tensor], targets: list[torch.Tensor], fill: float) -> TreeCache:
    """A copy of `cache` in which the columns `sources[row]` have become `targets[row]`, and `fill` is in all others."""
    copied = TreeCache()
    lengths = [int(places[-1]) + 1 if len(places) else 0 for places in targets]
    for layer in cache.layers:
        moved, *indexer = [_moved_layer(part, sources, targets, lengths, fill) for part in layer.parts]
        moved.indexer = indexer[0] if indexer else None
        copied.layers.append(moved)
    return copied


def _moved_layer(
    layer: TreeLayer, sources: list[torch.Tensor], targets: list[torch.Tensor], lengths: list[int], fill: float
) -> TreeLayer:
    if not layer.is_initialized:
        return TreeLayer()
    copies = []
    for held in (layer.keys, layer.values):
        # Zeros for what a sliding layer has forgotten: its window hides them.
        states = torch.nn.functional.pad(held[: len(lengths)], (0, 0, layer.dropped, 0))
        moved = states.new_full((*states.shape[:2], max(lengths), states.shape[3]), fill)
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            moved[row][:, target.to(states.device)] = states[row][:, source.to(states.device)]
        copies.append(moved)
    return TreeLayer.holding(copies[0], copies[1], lengths)


def _columns(mine: torch.Tensor, length: int) -> torch.Tensor:
    """The columns of the first `length` tokens that count; `mine` `[columns]` bool says which of the first ones do."""
    counted = mine.nonzero()[:, 0]
    return torch.cat([counted, torch.arange(len(mine), len(mine) + max(length - len(counted), 0))])[:length]


def _window(layer: CacheLayerMixin) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def _adopt_layer(layer: CacheLayerMixin) -> TreeLayer:
    if isinstance(layer, _EMPTY_LAYERS) or not layer.is_initialized:
        return TreeLayer(_window(layer))
    length = layer.get_seq_length()
    lengths = [length] * layer.keys.shape[0]
    adopted = TreeLayer.holding(layer.keys, layer.values, lengths, _window(layer))
    adopted.dropped = length - layer.keys.shape[2]
    if getattr(layer, "is_indexer_initialized", False):
        keys = layer.indexer_keys[:, None]
        adopted.indexer = TreeLayer.holding(keys, keys[..., :0], lengths)
    return adopted
