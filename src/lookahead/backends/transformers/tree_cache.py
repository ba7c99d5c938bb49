"""Keys and values of a text with capacity for token trees, and their conversion from and to callers' caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from lookahead.backends.base import TextRow
from lookahead.backends.machine import upload
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

Integers = NDArray[np.int64]

_FIRST_CAPACITY = 256
_SCRATCH = 64
"""Free columns of a layer with a window after growth."""
_SLACK = 16
"""A layer with a window drops invisible columns when they exceed 1 / `_SLACK` of the window."""
_SMALL = 1 << 15
"""Largest number of key elements for concatenation in plain decoding: it saves 60 to 90 us a step in 5 to 6 layers."""
_GROWTH = 64
"""Growth of a layer: 1 / `_GROWTH` of its columns, to save memory."""


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of a text in one layer.

    A pass writes the nodes of its tree after the text, as scratch. `TreeCache.set_length` keeps the accepted ones, and
    the next pass overwrites the rest. A layer with a window drops columns that no later token sees.

    Args:
        window: Visible tokens of a token, itself included; all if not given.
        block: Growth in tokens; a part of the current size if not given.

    Attributes:
        keys: `[1, heads, capacity, head_dim]`.
        values: `[1, heads, capacity, head_dim]`.
        length: Tokens of the text, dropped ones included.
        window: The argument `window`.
        block: The argument `block`.
        dropped: Number of dropped columns; the first column of `keys` has token number `dropped`.
        indexer: Keys of the layer's indexer, without values; `None` without an indexer.
    """

    def __init__(self, window: int | None = None, block: int | None = None) -> None:
        super().__init__()
        self.length = self.dropped = 0
        self.window = window
        self.block = block
        self.is_sliding = window is not None  # whether columns are dropped; transformers reads it
        self.indexer: TreeLayer | None = None

    @classmethod
    def holding(cls, keys: torch.Tensor, values: torch.Tensor, length: int, window: int | None = None) -> TreeLayer:
        """Make a layer from the last keys and values of a text of `length` tokens, without writing into them."""
        layer = cls(window)
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
        layer.length = length
        layer.dropped = length - keys.shape[2]
        return layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set heads, head sizes, dtype and device from the first states."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self._concatenated = 0 if self.block else _SMALL // max(key_states.shape[1] * key_states.shape[3], 1)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states `[1, heads, nodes, head_dim]` after the text; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype is not self.keys.dtype:  # the caller's cache has another type
            self.keys = self.keys.to(torch.promote_types(key_states.dtype, self.keys.dtype))
            self.values = self.values.to(torch.promote_types(value_states.dtype, self.values.dtype))
        start = self.length - self.dropped
        count = key_states.shape[2]
        end = start + count
        columns = self.keys.shape[2]
        if end > columns:
            # A small prompt, or one token in plain decoding.
            if end <= self._concatenated and start == columns and (count == 1 or not start) and _may_concatenate():
                self.keys = torch.cat([self.keys, key_states], 2)
                self.values = torch.cat([self.values, value_states], 2)
                return self.keys, self.values
            self._grow(end, start)
        # `narrow` is three times as fast as a slice
        self.keys.narrow(2, start, count).copy_(key_states)
        self.values.narrow(2, start, count).copy_(value_states)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write keys `[1, nodes, size]` of `indexer`, and return all of them."""
        if self.indexer is None:
            self.indexer = TreeLayer(block=self.block)
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def adopt(self, layer: TreeLayer, length: int) -> None:
        """Copy the first `length` tokens of another layer. Windows hide dropped ones."""
        if not layer.is_initialized:
            return
        if not self.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
        if length > self.keys.shape[2]:
            self._grow(length, 0)
        for states, source in zip(_states(self), _states(layer), strict=True):
            # Attention with a dense mask multiplies hidden values by 0, and 0 * NaN is NaN.
            states[:, :, : layer.dropped] = 0
            states[:, :, layer.dropped : length] = source[:, :, : length - layer.dropped]
        if layer.indexer is not None:
            self.indexer = TreeLayer(block=self.block)
            self.indexer.adopt(layer.indexer, length)

    def drop(self) -> None:
        """Drop the columns that no later token sees, and move the others to new tensors."""
        if self.window is None:
            return
        unseen = self.length - self.window - self.dropped
        if unseen <= self.window // _SLACK:
            return
        columns = self.length - self.dropped - unseen
        self._move(columns + _SCRATCH, unseen, columns)
        self.dropped += unseen

    def get_seq_length(self) -> int:
        """Return the tokens of the text."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for a query of `query_length` tokens, and their first index."""
        return self.length - self.dropped + query_length, self.dropped

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def _grow(self, needed: int, columns: int) -> None:
        """Grow to at least `needed` columns, and keep the first `columns` ones."""
        if self.block is None:
            step = _FIRST_CAPACITY if self.window is None else _SCRATCH
            capacity = needed + max(step, needed // _GROWTH)
        else:
            capacity = whole_blocks(needed, self.block)
        self._move(capacity, 0, columns)

    def _move(self, capacity: int, first: int, columns: int) -> None:
        """Move `columns` columns from `first` on to new tensors of `capacity` columns."""
        for name in ("keys", "values"):
            states = getattr(self, name)
            with torch.inference_mode(False):  # an inference tensor could not be written later
                size = (*states.shape[:2], capacity, states.shape[3])
                moved = torch.empty(size, dtype=states.dtype, device=states.device)
            moved[:, :, :columns] = states[:, :, first : first + columns]
            setattr(self, name, moved)


def _may_concatenate() -> bool:
    """Return whether other numbers of columns need no compilation, and new tensors can be written later."""
    return not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())


def _states(layer: TreeLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def whole_blocks(tokens: int, block: int) -> int:
    """Round a number of tokens up to whole blocks."""
    return -(-tokens // block) * block


class TreeCache(Cache):  # type: ignore[misc]
    """Keys and values of a text: a `TreeLayer` for each layer, made on first use. Callers get transformers' caches.

    Args:
        windows: Window of each layer; the last one repeats.
        block: See `TreeLayer`.

    Attributes:
        length: Tokens of the text: the first column of the scratch.
    """

    def __init__(self, windows: Sequence[int | None] = (), block: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.length = 0
        self._windows = list(windows) or [None]
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer; see `TreeLayer.update`."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else self.layer(layer_idx)
        return layer.update(key_states, value_states)

    def layer(self, index: int) -> TreeLayer:
        """A layer, made with those before it if there is none yet."""
        layers: list[TreeLayer] = self.layers
        while len(layers) <= index:
            layers.append(TreeLayer(self._windows[min(len(layers), len(self._windows) - 1)], self._block))
        return layers[index]

    @property
    def _filled(self) -> list[TreeLayer]:
        """Filled layers and their indexers; some models have layers with the states of other layers."""
        return [
            part for layer in self.layers if layer.is_initialized for part in (layer, layer.indexer) if part is not None
        ]

    @property
    def allocated(self) -> int:
        """Capacity in tokens."""
        return max((layer.keys.shape[2] for layer in self._filled), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        parts = [part for layer in self._filled for part in _states(layer)]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def adopt(self, cache: TreeCache, tokens: int) -> None:
        """Replace the text by a copy of the first `tokens` tokens of another one."""
        for index, layer in enumerate(cache.layers):
            self.layer(index).adopt(layer, tokens)
        self.set_length(tokens)

    def move(self, slots: Integers, targets: Integers) -> None:
        """Copy the states of nodes from some slots of the scratch to others."""
        uploads: dict[tuple[torch.device, int], torch.Tensor] = {}
        for layer in self._filled:
            key = layer.device, layer.dropped
            if key not in uploads:
                columns = np.stack([slots, targets]) + (self.length - layer.dropped)
                (uploads[key],) = upload(layer.device, columns)
            source, target = uploads[key]
            for states in (layer.keys, layer.values):
                states[:, :, target] = states[:, :, source]

    @property
    def dropped(self) -> int:
        """Number of columns that layers with a window have dropped."""
        return next((layer.dropped for layer in self._filled if layer.window is not None), 0)

    def drop(self) -> None:
        """Drop columns that no later token sees, in layers with a window."""
        for layer in self.layers:
            layer.drop()

    def set_length(self, tokens: int) -> None:
        """Set the number of tokens; the states of others become scratch."""
        self.length = tokens
        for layer in self.layers:
            if layer.is_initialized:
                layer.length = tokens
                if layer.dropped > tokens:
                    layer.dropped = tokens
                if layer.indexer is not None:
                    layer.indexer.length = tokens


class Row(TextRow):
    """Keys and values of one text.

    Args:
        cache: Cache of the text; a new one if not given.
        block: Growth of a new cache; see `TreeLayer`.
        shift: See `TextRow`.

    Attributes:
        cache: The cache.
        padding: Number of padding tokens of the prompt; transformers counts them for some limits.
    """

    padding = 0

    def __init__(self, cache: TreeCache | None = None, block: int | None = None, shift: int = 0) -> None:
        self.cache = TreeCache(block=block) if cache is None else cache
        self.shift = shift

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens with keys and values."""
        return self.cache.length

    @property
    def capacity(self) -> int:
        """Capacity in tokens."""
        return self.cache.allocated

    def copy_start(self, other: Row, tokens: int) -> None:
        """Copy the first `tokens` tokens of another row."""
        self.cache.adopt(other.cache, tokens)

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` tokens."""
        self.cache.set_length(min(self.length, tokens))

    def adopt(self, text: Row) -> None:
        """Copy another row."""
        self.cache.adopt(text.cache, text.length)


_BLANK = 2.0**-7
"""Value of hidden columns in callers' caches: finite, because attention multiplies it by 0, and recognisable."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)

_EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""Layers that never hold states; from transformers 5.20 on."""


def adopt_cache(cache: Cache, mask: torch.Tensor) -> list[Row]:
    """Return rows with the visible tokens of a transformers cache, which stays unchanged.

    Args:
        cache: Cache of the caller, or of the model's own prefill, with a column for every token, hidden ones included.
        mask: Mask of the whole text, `[batch, columns]` bool; the cache has its first columns.

    Raises:
        InvalidArgumentError: The cache has other rows than the mask, or lacks tokens that the mask shows.
        UnsupportedArgumentError: The cache is of another class.
    """
    # Empty caches with lazily made layers have none yet.
    if (
        not isinstance(cache, DynamicCache)
        or cache.offloading
        or any(type(layer) not in (*_LAYERS, *_EMPTY_LAYERS) for layer in cache.layers)
    ):
        raise UnsupportedArgumentError(
            f"{CACHE}={type(cache).__name__} is not supported by lookahead decoding; pass a DynamicCache, the "
            "cache of an earlier call, or none"
        )
    adopted = [Row(TreeCache([_window(layer) for layer in cache.layers])) for _ in mask]
    if cache.get_seq_length() == 0:
        return adopted
    held = mask[:, : cache.get_seq_length()]
    filled = [layer for layer in cache.layers if layer.is_initialized and not isinstance(layer, _EMPTY_LAYERS)]
    if len(held) != filled[0].keys.shape[0]:
        raise InvalidArgumentError(
            f"{CACHE} has {filled[0].keys.shape[0]} rows, but input_ids has {len(held)}; they must be the same texts"
        )
    length = cache.get_seq_length()
    if not all(_is_whole(layer, length) for layer in filled):
        raise UnsupportedArgumentError(
            f"{CACHE} lacks keys and values of its {length} tokens in some layers, which lookahead decoding does not "
            "support; pass a cache as generate returns it, or use the model's own generate"
        )
    _check_states(filled[0].keys, held.cpu())
    for place, (row, counted) in enumerate(zip(adopted, held, strict=True)):
        row.cache.layers = [_adopt_layer(layer, place, counted) for layer in cache.layers]
        row.cache.length = int(counted.sum())
    return adopted


def _adopt_layer(layer: CacheLayerMixin, row: int, counted: torch.Tensor) -> TreeLayer:
    """Return the visible tokens of a row, by the mask `counted` `[columns]`; without a copy if all are visible."""
    if isinstance(layer, _EMPTY_LAYERS) or not layer.is_initialized:
        return TreeLayer(_window(layer))
    length = int(counted.sum())
    columns = layer.keys.shape[2]
    place = slice(row, row + 1)
    # A sliding layer has only the last columns.
    picked = slice(None) if bool(counted.all()) else counted[-columns:].to(layer.keys.device).nonzero()[:, 0]
    adopted = TreeLayer.holding(
        layer.keys[place][:, :, picked], layer.values[place][:, :, picked], length, _window(layer)
    )
    if getattr(layer, "is_indexer_initialized", False):
        keys = layer.indexer_keys[place][:, None, picked]
        adopted.indexer = TreeLayer.holding(keys, keys[..., :0], length)
    return adopted


def return_cache(decoded: Sequence[Row], cache: Cache, mask: torch.Tensor) -> Cache:
    """Fill the caller's cache with the decoded texts, as transformers would leave it, and return it.

    Args:
        decoded: Decoded rows, not used later.
        cache: Cache of the caller, or an empty one.
        mask: Mask of the caller's text, `[batch, columns]` bool; all later tokens are visible.
    """
    rows = [(row, _columns(row.length, counted)) for row, counted in zip(decoded, mask.cpu(), strict=True)]
    layers = decoded[0].cache.layers
    while len(cache.layers) < len(layers):
        cache.layers.append(DynamicLayer() if layers[len(cache.layers)].indexer is None else DynamicIndexedLayer())
    # Layers with the states of other layers are empty, and may be missing.
    for index, (layer, states) in enumerate(zip(cache.layers, layers, strict=False)):
        if not states.is_initialized:
            continue
        if not layer.is_initialized:
            layer.lazy_initialization(states.keys, states.values)
        window = _window(layer)
        laid_out = [_laid_out(row, index, columns, window) for row, columns in rows]
        parts = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*laid_out, strict=True)]
        layer.keys, layer.values, *indexer = parts
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = int(rows[0][1][-1]) + 1
        if indexer and isinstance(layer, DynamicIndexedLayer):
            layer.lazy_initialization_indexer(indexer[0])
            layer.indexer_keys = indexer[0][:, 0]
    return cache


def _columns(length: int, counted: torch.Tensor) -> torch.Tensor:
    """Return the columns of a text of `length` tokens, by the mask `counted` `[columns]` of the first columns."""
    columns = counted.nonzero()[:, 0]
    end = len(counted) + max(length - len(columns), 0)
    columns = torch.cat([columns, torch.arange(len(counted), end, device=counted.device)])
    return columns[:length]


def _laid_out(row: Row, index: int, columns: torch.Tensor, window: int | None) -> list[torch.Tensor]:
    """Return keys, values and indexer keys of a text in a layer, with hidden columns, and cut to the window."""
    layer = row.cache.layers[index]
    parts = [layer.keys, layer.values] if layer.indexer is None else [layer.keys, layer.values, layer.indexer.keys]
    laid_out = []
    for states, dropped in zip(parts, (layer.dropped, layer.dropped, 0), strict=False):
        text = states[:, :, : row.length - dropped]
        if int(columns[-1]) >= row.length or (dropped and window is None):
            whole = states.new_full((1, states.shape[1], int(columns[-1]) + 1, states.shape[3]), _BLANK)
            whole[:, :, columns[dropped:].to(states.device)] = text
            text = whole
        laid_out.append(text if window is None else text[:, :, max(text.shape[2] - window + 1, 0) :])
    return laid_out


def _check_states(keys: torch.Tensor, held: torch.Tensor) -> None:
    """Refuse a mask that shows tokens hidden in the cache; keys `[batch, heads, columns, size]`."""
    columns = keys.shape[2]
    if bool(((keys[:, 0] == _BLANK).all(dim=-1).cpu() & held[:, -columns:]).any()):
        raise InvalidArgumentError(
            "attention_mask shows tokens that it hid when the cache was filled, so the cache lacks them; pass the mask "
            "of the earlier call, extended by the new tokens"
        )


def _is_whole(layer: CacheLayerMixin, length: int) -> bool:
    """Return whether a layer has at least the columns that transformers keeps of a text of `length` tokens."""
    window = _window(layer)
    least = length if window is None else min(length, window - 1)
    return bool(layer.get_seq_length() == length and layer.keys.shape[2] >= least)


def _window(layer: CacheLayerMixin) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
