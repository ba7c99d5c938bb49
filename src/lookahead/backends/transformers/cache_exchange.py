"""Caches that callers bring along and take away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

_BLANK = 2.0**-7
"""What fills the columns of hidden tokens: finite, as attention multiplies it by 0, and known again by its looks."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)

_EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""Layers that never hold states; from transformers 5.20 on."""


def adopt_cache(cache: Cache, mask: torch.Tensor) -> list[TreeCache]:
    """What to decode with, for each row: caches that begin with what `cache` holds and leave that as it is.

    A cache of transformers has a column for every input token, hidden ones included; decoding goes on
    with the tokens that count.

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
    adopted = [TreeCache([_window(layer) for layer in cache.layers]) for _ in mask]
    if cache.get_seq_length() == 0:
        return adopted
    held = mask[:, : cache.get_seq_length()]
    filled = [layer for layer in cache.layers if layer.is_initialized and not isinstance(layer, _EMPTY_LAYERS)]
    if len(held) != filled[0].keys.shape[0]:
        raise InvalidArgumentError(
            f"past_key_values holds {filled[0].keys.shape[0]} rows, but input_ids has {len(held)}; they must be the "
            "same texts"
        )
    _check_states(filled[0].keys, held.cpu())
    for row, (own, counted) in enumerate(zip(adopted, held, strict=True)):
        own.layers = [_adopt_layer(layer, row, counted) for layer in cache.layers]
    return adopted


def _adopt_layer(layer: CacheLayerMixin, row: int, counted: torch.Tensor) -> TreeLayer:
    """The tokens of a row that count, `[columns]` bool says which; without a copy if all do."""
    if isinstance(layer, _EMPTY_LAYERS) or not layer.is_initialized:
        return TreeLayer(_window(layer))
    length, columns, place = int(counted.sum()), layer.keys.shape[2], slice(row, row + 1)
    # Of a sliding layer the last columns are left.
    picked = slice(None) if bool(counted.all()) else counted[-columns:].to(layer.keys.device).nonzero()[:, 0]
    adopted = TreeLayer.holding(
        layer.keys[place][:, :, picked], layer.values[place][:, :, picked], length, _window(layer)
    )
    if getattr(layer, "is_indexer_initialized", False):
        keys = layer.indexer_keys[place][:, None, picked]
        adopted.indexer = TreeLayer.holding(keys, keys[..., :0], length)
    return adopted


def return_cache(decoded: Sequence[TreeCache], cache: Cache, mask: torch.Tensor) -> Cache:
    """The cache that the caller gets: `cache` with what decoding added, as transformers would have left it.

    Args:
        decoded: What was decoded, for each row; it is used no more.
        cache: What the caller passed, or an empty one.
        mask: Which tokens of the text that was handed over count, `[batch, columns]` bool; later ones all do.
    """
    rows = list(zip(decoded, mask.cpu(), strict=True))
    layers = decoded[0].layers
    while len(cache.layers) < len(layers):
        cache.layers.append(DynamicLayer() if layers[len(cache.layers)].indexer is None else DynamicIndexedLayer())
    # Layers that borrow the states of others hold nothing, and decoding may not have come to them.
    for index, (layer, states) in enumerate(zip(cache.layers, layers, strict=False)):
        if not states.is_initialized:
            continue
        if not layer.is_initialized:
            layer.lazy_initialization(states.keys, states.values)
        window = _window(layer)
        laid_out = [_laid_out(text.layers[index], counted, window) for text, counted in rows]
        parts = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*laid_out, strict=True)]
        layer.keys, layer.values, *indexer = parts
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = int(_columns(*rows[0])[-1]) + 1
        if indexer and isinstance(layer, DynamicIndexedLayer):
            layer.lazy_initialization_indexer(indexer[0])
            layer.indexer_keys = indexer[0][:, 0]
    return cache


def _columns(text: TreeCache | TreeLayer, counted: torch.Tensor) -> torch.Tensor:
    """The columns of the tokens of a text; `counted` `[columns]` bool says which of the first ones are."""
    columns = counted.nonzero()[:, 0]
    columns = torch.cat([columns, torch.arange(len(counted), len(counted) + max(text.length - len(columns), 0))])
    return columns[: text.length]


def _laid_out(layer: TreeLayer, counted: torch.Tensor, window: int | None) -> list[torch.Tensor]:
    """Keys, values and keys of the indexer, if there is one, of a text with a column for each hidden token as well; in
    a layer with a window the last ones, as transformers keeps them."""
    columns = _columns(layer, counted)
    parts = [layer.keys, layer.values] if layer.indexer is None else [layer.keys, layer.values, layer.indexer.keys]
    found = []
    for states, dropped in zip(parts, (layer.dropped, layer.dropped, 0), strict=False):
        kept = states[:, :, : layer.length - dropped]
        if int(columns[-1]) >= layer.length or (dropped and window is None):
            whole = states.new_full((*states.shape[:2], int(columns[-1]) + 1, states.shape[3]), _BLANK)
            whole[:, :, columns[dropped:].to(states.device)] = kept
            kept = whole
        found.append(kept if window is None else kept[:, :, max(kept.shape[2] - window + 1, 0) :])
    return found


def _check_states(keys: torch.Tensor, held: torch.Tensor) -> None:
    """Refuse a mask that shows what was hidden when the cache was filled; keys `[batch, heads, columns, size]`."""
    columns = keys.shape[2]
    if bool(((keys[:, 0] == _BLANK).all(dim=-1).cpu() & held[:, -columns:]).any()):
        raise InvalidArgumentError(
            "attention_mask shows tokens that it hid when past_key_values was filled, so the cache lacks them; pass "
            "the mask of the call before, longer by what has come since"
        )


def _window(layer: CacheLayerMixin) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
