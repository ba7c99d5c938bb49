"""Keys and values of texts, with room for token trees behind them; and caches that callers bring and take away."""

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
"""Columns that a layer with a window has room for beside those that later tokens see."""
_SLACK = 16
"""A layer with a window forgets columns when they are so many times fewer than the window; it copies the others."""
_SMALL = 1 << 15
"""Numbers in keys that are copied for each token of plain decoding in less time than it takes to write into a part of
them and to read another: 60 to 90 us a step less in 5 and 6 layers, after 60 to 160 tokens."""
_GROWTH = 64
"""A layer gets room for so many times fewer columns than it holds, so that memory is near to what is needed."""


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of some texts in one layer.

    A forward pass writes the nodes of its trees behind the longest text, as scratch. `TreeCache.commit` keeps the
    accepted ones, and the next pass overwrites the rest.

    A layer with a window forgets columns that no later token sees, once there are some.

    Args:
        window: Tokens that a token sees, itself included; all if not given.
        block: Tokens by which it grows; by a part of what it has if not given.

    Attributes:
        keys: `[texts, heads, capacity, head_dim]`; `values` likewise.
        length: Tokens of the longest text, those that were forgotten included.
        window, block: As above.
        dropped: Columns that were forgotten: the first one in `keys` is that of token number `dropped`.
        indexer: Keys by which the layer picks those that it attends to, without values; `None` if it attends to all.
    """

    def __init__(self, window: int | None = None, block: int | None = None) -> None:
        super().__init__()
        self.length = self.dropped = 0
        self.window = window
        self.block = block
        self.is_sliding = window is not None  # whether columns are forgotten; transformers asks each layer
        self.indexer: TreeLayer | None = None

    @classmethod
    def holding(cls, keys: torch.Tensor, values: torch.Tensor, length: int, window: int | None = None) -> TreeLayer:
        """A layer with the last keys and values of a text of this length. There is no room behind them, so that nothing
        is written into these tensors."""
        layer = cls(window)
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
        layer.length = length
        layer.dropped = length - keys.shape[2]
        return layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take texts, heads, head sizes, dtype and device from the first states that come."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states `[texts, heads, nodes, head_dim]` behind the longest text; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype is not self.keys.dtype:  # the caller's cache was filled in another type
            self.keys = self.keys.to(torch.promote_types(key_states.dtype, self.keys.dtype))
            self.values = self.values.to(torch.promote_types(value_states.dtype, self.values.dtype))
        start = self.length - self.dropped
        count = key_states.shape[2]
        end = start + count
        if end > self.keys.shape[2]:
            if self._stays_full(start, key_states):
                self.keys = torch.cat([self.keys, key_states], 2)
                self.values = torch.cat([self.values, value_states], 2)
                return self.keys, self.values
            self._grow(end, start)
        keys = self.keys
        values = self.values
        # `narrow` does what a slice does, in a third of the time
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """`update` for the keys `[texts, nodes, size]` of `indexer`, which are returned in the same way."""
        if self.indexer is None:
            self.indexer = TreeLayer(block=self.block)
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def adopt(self, texts: Sequence[tuple[TreeLayer, int]], lengths: Sequence[int]) -> None:
        """Begin with what other layers hold.

        Args:
            texts: For each text the layer, and which one of its texts that is.
            lengths: Tokens to take of each. What was forgotten of them is hidden by windows.
        """
        filled = [layer for layer, _ in texts if layer.is_initialized]
        if not filled:
            return
        if not self.is_initialized:
            self.lazy_initialization(*(part[:1].expand(len(texts), -1, -1, -1) for part in _states(filled[0])))
        if max(lengths) > self.keys.shape[2]:
            self._grow(max(lengths), 0)
        for states in _states(self):
            # What is not filled is hidden: attention with a dense mask multiplies it by 0, and 0 * NaN is NaN.
            states[:, :, : max(lengths)] = 0
        for place, ((layer, row), length) in enumerate(zip(texts, lengths, strict=True)):
            if layer.is_initialized:
                for held, given in zip(_states(self), _states(layer), strict=True):
                    held[place, :, layer.dropped : length] = given[row, :, : length - layer.dropped]
        if filled[0].indexer is not None:
            self.indexer = TreeLayer(block=self.block)
            self.indexer.adopt([(layer.indexer or TreeLayer(), row) for layer, row in texts], lengths)

    def drop(self) -> None:
        """Forget the columns that no later token sees, if there are some. The others go to new tensors."""
        if self.window is None:
            return
        unseen = self.length - self.window - self.dropped
        if unseen <= self.window // _SLACK:
            return
        kept = self.length - self.dropped - unseen
        self._move(kept + _SCRATCH, unseen, kept)
        self.dropped += unseen

    def get_seq_length(self) -> int:
        """Tokens of the longest text."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query of `query_length` tokens sees, and where they begin."""
        return self.length - self.dropped + query_length, self.dropped

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def _stays_full(self, start: int, key_states: torch.Tensor) -> bool:
        """Whether nothing needs room behind these states yet, and all are few: a prompt, or one token more behind what
        is full."""
        count = key_states.shape[2]
        is_plain = start == self.keys.shape[2] and (count == 1 or not start) and self.block is None
        return (
            is_plain
            and not torch.compiler.is_compiling()  # each length would be compiled by itself
            and key_states.numel() // count * (start + count) <= _SMALL
            and not torch.is_inference_mode_enabled()  # its tensors could not be written to outside of it
        )

    def _grow(self, needed: int, kept: int) -> None:
        """Get room for at least `needed` tokens, with the first `kept` columns as they are; by a constant factor, so
        that growing costs little per token."""
        if self.block is None:
            step = _FIRST_CAPACITY if self.window is None else _SCRATCH
            capacity = needed + max(step, needed // _GROWTH)
        else:
            capacity = whole_blocks(needed, self.block)
        self._move(capacity, 0, kept)

    def _move(self, capacity: int, first: int, kept: int) -> None:
        """To new tensors of `capacity` columns, which begin with those from `first` on that are `kept`."""
        for name in ("keys", "values"):
            states = getattr(self, name)
            with torch.inference_mode(False):  # a tensor of inference mode could not be written to outside of it
                size = (*states.shape[:2], capacity, states.shape[3])
                moved = torch.empty(size, dtype=states.dtype, device=states.device)
            moved[:, :, :kept] = states[:, :, first : first + kept]
            setattr(self, name, moved)


def _states(layer: TreeLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens that there is room for in as many blocks as `tokens` need."""
    return -(-tokens // block) * block


class TreeCache(Cache):  # type: ignore[misc]
    """Keys and values of some texts: a `TreeLayer` for each layer, made as the model comes to it. Callers never see it:
    what a call takes and returns are caches of transformers.

    Args:
        windows: The window of each layer; the last one is that of all that follow. Without any, all keep all. Those of
            a lone text forget what no later token sees.
        block: See `TreeLayer`.
        texts: How many there are.

    Attributes:
        lengths: Tokens of each text.
    """

    def __init__(self, windows: Sequence[int | None] = (), block: int | None = None, texts: int = 1) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.lengths = [0] * texts
        self._windows = list(windows) or [None]
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer; see `TreeLayer.update`."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else self.layer(layer_idx)
        keys_and_values: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states)
        return keys_and_values

    def layer(self, index: int) -> TreeLayer:
        """A layer, made with those before it if there is none yet."""
        layers: list[TreeLayer] = self.layers
        while len(layers) <= index:
            layers.append(TreeLayer(self._windows[min(len(layers), len(self._windows) - 1)], self._block))
        return layers[index]

    @property
    def _filled(self) -> list[TreeLayer]:
        """The layers that the model has written to, and their indexers; some models have layers that borrow the states
        of others."""
        filled = [layer for layer in self.layers if layer.is_initialized]
        return filled + [layer.indexer for layer in filled if layer.indexer is not None]

    @property
    def longest(self) -> int:
        """Tokens of the longest text: where the scratch begins."""
        return max(self.lengths)

    @property
    def allocated(self) -> int:
        """Tokens of each text that there is room for."""
        return max((layer.keys.shape[2] for layer in self._filled), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        parts = [part for layer in self._filled for part in _states(layer)]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def adopt(self, rows: Sequence[Row], tokens: int | None = None) -> None:
        """Begin with what rows hold, one for each text; nothing else is left.

        Args:
            rows: As above.
            tokens: How many of the first tokens to take, which all have; all if not given.
        """
        lengths = [row.length if tokens is None else tokens for row in rows]
        for index in range(max(len(row.cache.layers) for row in rows)):
            texts = [(row.cache.layer(index), row.place) for row in rows]
            self.layer(index).adopt(texts, lengths)
        self._set_lengths(lengths)

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of `slots[text]`, ascending places in the scratch, behind each text.

        Only states that lie in the wrong place are copied, so an accepted path that is contiguous costs nothing.
        """
        scratch = self.longest
        misplaced = [
            (text, scratch + slot, target)
            for text, kept in enumerate(slots)
            for target, slot in enumerate(kept, start=self.lengths[text])
            if scratch + slot != target
        ]
        if misplaced:
            self.move(*np.array(misplaced).T)
        # Last, so that an interruption leaves a shorter text, and never one with wrong states.
        self._set_lengths([length + len(kept) for length, kept in zip(self.lengths, slots, strict=True)])

    def move_nodes(self, slots: Integers, targets: Integers) -> None:
        """Copy the states of nodes of the only text from some slots of the scratch to others."""
        self.move(np.zeros_like(slots), self.lengths[0] + slots, self.lengths[0] + targets)

    def extend(self, count: int) -> None:
        """Keep the states of the first `count` slots of the scratch of the only text."""
        if count:
            self._set_lengths([self.lengths[0] + count])

    def move(self, texts: Integers, sources: Integers, targets: Integers) -> None:
        """Copy the states at some places of some texts to others."""
        uploads: dict[tuple[torch.device, int], torch.Tensor] = {}
        for layer in self._filled:
            key = layer.device, layer.dropped
            if key not in uploads:
                columns = np.stack([texts, sources - layer.dropped, targets - layer.dropped])
                (uploads[key],) = upload(layer.device, columns)
            text, source, target = uploads[key]
            for states in _states(layer):
                states[text, :, target] = states[text, :, source]

    @property
    def dropped(self) -> int:
        """Columns that the layers with a window have forgotten."""
        return next((layer.dropped for layer in self._filled if layer.window is not None), 0)

    def drop(self) -> None:
        """Forget what no later token sees, in the layers with a window."""
        for layer in self.layers:
            layer.drop()

    def crop(self, tokens: int, text: int | None = None) -> None:
        """Forget all behind the first `tokens` tokens, of one text or of all."""
        texts = range(len(self.lengths)) if text is None else [text]
        self._set_lengths(
            [min(length, tokens) if place in texts else length for place, length in enumerate(self.lengths)]
        )

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        longest = max(lengths)
        for layer in self.layers:
            if layer.is_initialized:
                layer.length = longest
                if layer.dropped > longest:
                    layer.dropped = longest
                if layer.indexer is not None:
                    layer.indexer.length = longest


class Row(TextRow):
    """One text on a model: its keys and values.

    Args:
        cache: Where they are; in a cache of their own if not given.
        place: Which text of the cache it is.
        block: Tokens by which the room of a cache of its own grows; see `TreeLayer`.

    Attributes:
        cache, place: As above.
        padding: How many padding tokens its prompt had; they count where transformers counts them.
    """

    padding = 0

    def __init__(self, cache: TreeCache | None = None, place: int = 0, block: int | None = None) -> None:
        self.cache = TreeCache(block=block) if cache is None else cache
        self.place = place

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens whose keys and values are kept."""
        return self.cache.lengths[self.place]

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.cache.allocated

    def copy_start(self, other: Row, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them."""
        self.cache.adopt([other], tokens)

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        self.cache.crop(tokens, self.place)

    def adopt(self, text: Row) -> None:
        """Begin with all that another row has."""
        self.cache.adopt([text])


def rows_of(cache: TreeCache) -> list[Row]:
    """The texts of a cache."""
    return [Row(cache, place) for place in range(len(cache.lengths))]


_BLANK = 2.0**-7
"""What fills the columns of hidden tokens: finite, as attention multiplies it by 0, and known again by its looks."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)

_EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""Layers that never hold states; from transformers 5.20 on."""


def adopt_cache(cache: Cache, mask: torch.Tensor) -> list[Row]:
    """Rows to decode with, which begin with what `cache` holds and leave that as it is.

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
            f"{CACHE}={type(cache).__name__} is not supported by lookahead decoding; pass a DynamicCache, the "
            "cache that an earlier call returned, or none"
        )
    adopted = [Row(TreeCache([_window(layer) for layer in cache.layers])) for _ in mask]
    if cache.get_seq_length() == 0:
        return adopted
    held = mask[:, : cache.get_seq_length()]
    filled = [layer for layer in cache.layers if layer.is_initialized and not isinstance(layer, _EMPTY_LAYERS)]
    if len(held) != filled[0].keys.shape[0]:
        raise InvalidArgumentError(
            f"{CACHE} holds {filled[0].keys.shape[0]} rows, but input_ids has {len(held)}; they must be the same texts"
        )
    _check_states(filled[0].keys, held.cpu())
    for place, (row, counted) in enumerate(zip(adopted, held, strict=True)):
        row.cache.layers = [_adopt_layer(layer, place, counted) for layer in cache.layers]
        row.cache.lengths = [int(counted.sum())]
    return adopted


def _adopt_layer(layer: CacheLayerMixin, row: int, counted: torch.Tensor) -> TreeLayer:
    """The tokens of a row that count, `[columns]` bool says which; without a copy if all do."""
    if isinstance(layer, _EMPTY_LAYERS) or not layer.is_initialized:
        return TreeLayer(_window(layer))
    length = int(counted.sum())
    columns = layer.keys.shape[2]
    place = slice(row, row + 1)
    # Of a sliding layer the last columns are left.
    picked = slice(None) if bool(counted.all()) else counted[-columns:].to(layer.keys.device).nonzero()[:, 0]
    adopted = TreeLayer.holding(
        layer.keys[place][:, :, picked], layer.values[place][:, :, picked], length, _window(layer)
    )
    if getattr(layer, "is_indexer_initialized", False):
        keys = layer.indexer_keys[place][:, None, picked]
        adopted.indexer = TreeLayer.holding(keys, keys[..., :0], length)
    return adopted


def return_cache(decoded: Sequence[Row], cache: Cache, mask: torch.Tensor) -> Cache:
    """The cache that the caller gets: `cache` with what decoding added, as transformers would have left it.

    Args:
        decoded: What was decoded; it is used no more.
        cache: What the caller passed, or an empty one.
        mask: Which tokens of the text that was handed over count, `[batch, columns]` bool; later ones all do.
    """
    rows = [(row, _columns(row.length, counted)) for row, counted in zip(decoded, mask.cpu(), strict=True)]
    layers = decoded[0].cache.layers
    while len(cache.layers) < len(layers):
        cache.layers.append(DynamicLayer() if layers[len(cache.layers)].indexer is None else DynamicIndexedLayer())
    # Layers that borrow the states of others hold nothing, and decoding may not have come to them.
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
    """The columns of a text of so many tokens; `counted` `[columns]` bool says which of the first ones they are."""
    columns = counted.nonzero()[:, 0]
    columns = torch.cat([columns, torch.arange(len(counted), len(counted) + max(length - len(columns), 0))])
    return columns[:length]


def _laid_out(row: Row, index: int, columns: torch.Tensor, window: int | None) -> list[torch.Tensor]:
    """Keys, values and keys of the indexer, if there is one, of a text in a layer, with a column for each hidden token
    as well; in a layer with a window the last ones, as transformers keeps them."""
    layer = row.cache.layers[index]
    parts = [layer.keys, layer.values] if layer.indexer is None else [layer.keys, layer.values, layer.indexer.keys]
    found = []
    for states, dropped in zip(parts, (layer.dropped, layer.dropped, 0), strict=False):
        kept = states[row.place : row.place + 1, :, : row.length - dropped]
        if int(columns[-1]) >= row.length or (dropped and window is None):
            whole = states.new_full((1, states.shape[1], int(columns[-1]) + 1, states.shape[3]), _BLANK)
            whole[:, :, columns[dropped:].to(states.device)] = kept
            kept = whole
        found.append(kept if window is None else kept[:, :, max(kept.shape[2] - window + 1, 0) :])
    return found


def _check_states(keys: torch.Tensor, held: torch.Tensor) -> None:
    """Refuse a mask that shows what was hidden when the cache was filled; keys `[batch, heads, columns, size]`."""
    columns = keys.shape[2]
    if bool(((keys[:, 0] == _BLANK).all(dim=-1).cpu() & held[:, -columns:]).any()):
        raise InvalidArgumentError(
            "attention_mask shows tokens that it hid when the cache was filled, so the cache lacks them; pass "
            "the mask of the call before, longer by what has come since"
        )


def _window(layer: CacheLayerMixin) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
