"""A key-value cache of one text, with room for a token tree behind it; and caches that callers bring and take away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from lookahead.backends.machine import upload
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

_FIRST_CAPACITY = 256
_SCRATCH = 64
"""Columns that a layer with a window has room for beside those that later tokens see."""
_SLACK = 16
"""A layer with a window forgets columns when they are so many times fewer than the window; it copies the others."""
_GROWTH = 64
"""A layer gets room for so many times fewer columns than it holds, so that memory is near to what is needed."""


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one text in one layer.

    A forward pass writes the nodes of a tree behind the text, as scratch. `commit` keeps the accepted ones, and the
    next pass overwrites the rest.

    A layer with a window forgets columns that no later token sees, once there are some.

    Args:
        window: Tokens that a token sees, itself included; all if not given.
        block: Tokens by which it grows; by a part of what it has if not given.

    Attributes:
        keys: `[1, heads, capacity, head_dim]`; `values` likewise.
        length: Tokens of the text, those that were forgotten included.
        window, block: As above.
        dropped: Columns that were forgotten: the first one in `keys` is that of token number `dropped`.
        indexer: Keys by which the layer picks those that it attends to, without values; `None` if it attends to all.
    """

    def __init__(self, window: int | None = None, block: int | None = None) -> None:
        super().__init__()
        self.length = self.dropped = 0
        self.window, self.block = window, block
        self.indexer: TreeLayer | None = None

    @classmethod
    def holding(cls, keys: torch.Tensor, values: torch.Tensor, length: int, window: int | None = None) -> TreeLayer:
        """A layer with the last keys and values of a text of this length. There is no room behind them, so that nothing
        is written into these tensors."""
        layer = cls(window)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layer.length, layer.dropped = length, length - keys.shape[2]
        return layer

    @property
    def is_sliding(self) -> bool:
        """Whether columns are forgotten."""
        return self.window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take heads, head sizes, dtype and device from the first states that come."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states `[1, heads, nodes, head_dim]` behind the text; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.length - self.dropped, key_states.shape[2]
        end = start + count
        if end > self.keys.shape[2]:
            self._grow(end)
        keys, values = self.keys, self.values
        # `narrow` does what a slice does, in a third of the time
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """`update` for the keys `[1, nodes, size]` of `indexer`, which are returned in the same way."""
        if self.indexer is None:
            self.indexer = TreeLayer(block=self.block)
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def drop(self) -> None:
        """Forget the columns that no later token sees, if there are some. The others go to new tensors."""
        if self.window is None:
            return
        unseen = self.length - self.window - self.dropped
        if unseen <= self.window // _SLACK:
            return
        kept = self.length - self.dropped - unseen
        for name in ("keys", "values"):
            states = getattr(self, name)
            moved = states.new_zeros((*states.shape[:2], kept + _SCRATCH, states.shape[3]))
            moved[:, :, :kept] = states[:, :, unseen : unseen + kept]
            setattr(self, name, moved)
        self.dropped += unseen

    def keep_all(self) -> None:
        """Forget nothing from now on; zeros stand for what was forgotten, which the window hides."""
        for name in ("keys", "values") if self.dropped else ():
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), (0, 0, self.dropped, 0)))
        self.window, self.dropped = None, 0

    def commit(self, slots: Sequence[int], uploads: dict[tuple[object, ...], torch.Tensor] | None = None) -> None:
        """Keep the states of `slots`, ascending places in the scratch, behind the text.

        Only states that lie in the wrong place are copied, so an accepted path that is contiguous costs nothing.

        Args:
            slots: As above.
            uploads: Columns that other layers have brought to their devices, to be used again and added to.
        """
        uploads = {} if uploads is None else uploads
        start = self.length - self.dropped
        settled = next((place for place, slot in enumerate(slots) if slot != place), len(slots))
        if settled < len(slots):
            columns = [start + slot for slot in slots[settled:]]
            key = self.keys.device, *columns
            if key not in uploads:
                (uploads[key],) = upload(self.keys.device, np.array(columns))
            place = slice(start + settled, start + len(slots))
            self.keys[:, :, place] = self.keys.index_select(2, uploads[key])
            self.values[:, :, place] = self.values.index_select(2, uploads[key])
        # Last, so that an interruption leaves a shorter text, and never one with wrong states.
        self.length += len(slots)

    def get_seq_length(self) -> int:
        """Tokens of the text."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query of `query_length` tokens sees, and where they begin."""
        return self.length - self.dropped + query_length, self.dropped

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def _grow(self, needed: int) -> None:
        """Get room for at least `needed` tokens; by a constant factor, so that growing costs little per token."""
        if self.block is None:
            step = _FIRST_CAPACITY if self.window is None else _SCRATCH
            capacity = max(needed, step, self.keys.shape[2] + max(step, self.keys.shape[2] // _GROWTH))
        else:
            capacity = whole_blocks(needed, self.block)
        kept = self.length - self.dropped
        for name in ("keys", "values"):
            states = getattr(self, name)
            with torch.inference_mode(False):  # a tensor of inference mode could not be written to outside of it
                size = (*states.shape[:2], capacity, states.shape[3])
                grown = torch.empty(size, dtype=states.dtype, device=states.device)
            if kept:
                grown[:, :, :kept] = states[:, :, :kept]
            setattr(self, name, grown)


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens that there is room for in as many blocks as `tokens` need."""
    return -(-tokens // block) * block


class TreeCache(Cache):  # type: ignore[misc]
    """Keys and values of one text: a `TreeLayer` for each layer, made as the model comes to it. Callers never see it:
    what a call takes and returns are caches of transformers.

    Args:
        windows: The window of each layer; the last one is that of all that follow. Without any, all keep all.
        block: See `TreeLayer`.
    """

    def __init__(self, windows: Sequence[int | None] = (), block: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._windows = list(windows) or [None]
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer; see `TreeLayer.update`."""
        layers: list[TreeLayer] = self.layers
        while len(layers) <= layer_idx:
            layers.append(TreeLayer(self._windows[min(len(layers), len(self._windows) - 1)], self._block))
        return layers[layer_idx].update(key_states, value_states)

    @property
    def _filled(self) -> list[TreeLayer]:
        """The layers that the model has written to, and their indexers; some models have layers that borrow the states
        of others."""
        filled = [layer for layer in self.layers if layer.is_initialized]
        return filled + [layer.indexer for layer in filled if layer.indexer is not None]

    @property
    def length(self) -> int:
        """Tokens of the text."""
        for layer in self.layers:
            if layer.is_initialized:
                return int(layer.length)
        return 0

    @property
    def allocated(self) -> int:
        """Tokens that there is room for."""
        return max((layer.keys.shape[2] for layer in self._filled), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        parts = [part for layer in self._filled for part in (layer.keys, layer.values)]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def copy_start(self, other: TreeCache, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another one, which has them."""
        for index, layer in enumerate(other.layers):
            if layer.is_initialized:
                self.update(layer.keys.narrow(2, 0, tokens), layer.values.narrow(2, 0, tokens), index)
            if layer.indexer is not None:
                self.update_indexer(layer.indexer.keys[:, 0, :tokens], index)
        for layer in self._filled:
            layer.length = tokens

    def commit(self, slots: Sequence[int]) -> None:
        """Keep the states of `slots` in every layer; see `TreeLayer.commit`."""
        uploads: dict[tuple[object, ...], torch.Tensor] = {}
        in_place = not slots or slots[-1] == len(slots) - 1
        for layer in self._filled:
            if in_place:
                layer.length += len(slots)
            else:
                layer.commit(slots, uploads)

    @property
    def dropped(self) -> int:
        """Columns that the layers with a window have forgotten."""
        return next((layer.dropped for layer in self._filled if layer.window is not None), 0)

    def drop(self) -> None:
        """Forget what no later token sees, in the layers with a window."""
        for layer in self.layers:
            layer.drop()

    def keep_all(self) -> None:
        """Have no layer forget anything from now on; see `TreeLayer.keep_all`."""
        self._windows = [None]
        for layer in self.layers:
            layer.keep_all()

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        for layer in self._filled:
            layer.length = min(layer.length, tokens)
            layer.dropped = min(layer.dropped, layer.length)


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
    for row, (row_cache, counted) in enumerate(zip(adopted, held, strict=True)):
        row_cache.layers = [_adopt_layer(layer, row, counted) for layer in cache.layers]
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
            padded = states.new_full((*states.shape[:2], int(columns[-1]) + 1, states.shape[3]), _BLANK)
            padded[:, :, columns[dropped:].to(states.device)] = kept
            kept = padded
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
