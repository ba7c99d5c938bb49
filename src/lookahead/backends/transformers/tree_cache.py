"""A key-value cache with room for a token tree behind the decided text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.backends.transfers import upload
from lookahead.errors import InvalidArgumentError

_FIRST_CAPACITY = 256
_SCRATCH = 64
"""Columns that a layer with a window has room for beside those that later tokens see."""
_SLACK = 16
"""A layer with a window forgets columns when they are so many times fewer than the window; it copies the others."""
_GROWTH = 64
"""A layer gets room for so many times fewer columns than it holds, so that memory is near to what is needed."""


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one model layer.

    While a tree is run the forward pass writes its nodes behind the longest row, as scratch.
    `commit` keeps the accepted ones, each row contiguous from its start, and the next pass overwrites the
    rest. Rows may have different lengths; what lies behind the end of a row is hidden from it by the
    attention mask. At other times the layer works as any cache of transformers: what is written is kept.

    A layer with a window forgets columns that no later token of any row sees, once there are some.

    Args:
        window: Tokens that a token sees, itself included; all if not given.

    Attributes:
        keys: `[batch, heads, capacity, head_dim]`; `values` likewise.
        lengths: Tokens of each row, those that were forgotten included; empty before the first pass.
        keeps_all: Whether `update` keeps what it writes, without a `commit`.
        block: Tokens by which it grows; if `None`, by a part of what it has.
        window: As above.
        dropped: Columns that were forgotten: the first one in `keys` is that of token number `dropped`.
        indexer: Keys by which the layer picks those that it attends to, without values; `None` if it attends to all.
    """

    is_croppable = True

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.keeps_all = True
        self.block: int | None = None
        self.window = window
        self.dropped = 0
        self.indexer: TreeLayer | None = None

    @classmethod
    def holding(
        cls, keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int], window: int | None = None
    ) -> TreeLayer:
        """A layer with these keys and values, of rows of these lengths."""
        layer = cls(window)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.lengths = keys, values, list(lengths)
        return layer

    @property
    def is_sliding(self) -> bool:
        """Whether columns are forgotten."""
        return self.window is not None

    @property
    def longest(self) -> int:
        """Length of the longest row: where the scratch begins."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        return max(self.lengths) if self.lengths else 0  # not `default=`, which torch.compile does not know

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch size, heads, head sizes, dtype and device from the first states that come."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.lengths = [0] * key_states.shape[0]
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states `[batch, heads, nodes, head_dim]` behind the longest row; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.longest - self.dropped, key_states.shape[2]
        end = start + count
        if self.keeps_all and min(self.lengths) < self.longest:
            raise InvalidArgumentError(
                f"past_key_values holds {self.lengths} tokens in its rows; only lookahead decoding can go on from "
                "rows of different lengths"
            )
        # While a tree is run, `scratch` has seen to it that the tensors can be written to.
        if end > self.keys.shape[2] or (self.keeps_all and self._is_read_only()):
            self._grow(end)
        if self.keeps_all:
            self.lengths = [end + self.dropped] * len(self.lengths)
        keys, values = self.keys, self.values
        # `narrow` does what a slice does, in a third of the time
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        seen = keys.narrow(2, 0, end), values.narrow(2, 0, end)
        if self.window is not None and self.keeps_all:
            self.drop()
        return seen

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """`update` for the keys `[batch, nodes, size]` of `indexer`, which are returned in the same way."""
        if self.indexer is None:
            self.indexer = TreeLayer()
            self.indexer.keeps_all, self.indexer.block = self.keeps_all, self.block
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    @property
    def parts(self) -> list[TreeLayer]:
        """The layer and, if there is one, its indexer."""
        return [self] if self.indexer is None else [self, self.indexer]

    def drop(self) -> None:
        """Forget the columns that no later token sees, if there are some; one more is kept, for `crop`.

        Others go to new tensors, so that whoever kept the old ones has what they held.
        """
        if self.window is None or not self.is_initialized:
            return
        unseen = min(self.lengths) - self.window - self.dropped
        if unseen <= self.window // _SLACK:
            return
        kept = self.longest - self.dropped - unseen
        capacity = max(kept, self.window + self.window // _SLACK) + _SCRATCH
        for name in ("keys", "values"):
            states = getattr(self, name)
            moved = states.new_zeros((*states.shape[:2], capacity, states.shape[3]))
            moved[:, :, :kept] = states[:, :, unseen : unseen + kept]
            setattr(self, name, moved)
        self.dropped += unseen

    def keep_all(self) -> None:
        """Forget nothing from now on; zeros stand for what was forgotten, which the window hides."""
        for name in ("keys", "values") if self.dropped else ():
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), (0, 0, self.dropped, 0)))
        self.window, self.dropped = None, 0

    def commit(
        self, slots: Sequence[Sequence[int]], uploads: dict[tuple[object, ...], torch.Tensor] | None = None
    ) -> None:
        """Keep the states of `slots[row]`, ascending places in the scratch, behind each row's text.

        Only states that lie in the wrong place are copied, so an accepted path that is contiguous costs nothing.

        Args:
            slots: As above.
            uploads: Columns that other layers have brought to their devices, to be used again and added to.
        """
        uploads = {} if uploads is None else uploads
        scratch = self.longest - self.dropped
        for row, kept in enumerate(slots):
            target = self.lengths[row] - self.dropped
            settled = 0
            while settled < len(kept) and scratch + kept[settled] == target + settled:
                settled += 1
            if settled < len(kept):
                columns = [scratch + slot for slot in kept[settled:]]
                key = self.keys.device, *columns
                if key not in uploads:
                    (uploads[key],) = upload(self.keys.device, np.array(columns))
                source = uploads[key]
                place = slice(target + settled, target + len(kept))
                self.keys[row, :, place] = self.keys[row].index_select(1, source)
                self.values[row, :, place] = self.values[row].index_select(1, source)
        # Last, so that an interruption leaves a shorter text, and never one with wrong states.
        self.lengths = [length + len(kept) for length, kept in zip(self.lengths, slots, strict=True)]

    def get_seq_length(self) -> int:
        """Tokens kept in the longest row."""
        return self.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query of `query_length` tokens sees, and where they begin."""
        return self.longest - self.dropped + query_length, self.dropped

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; of a positive number, keep the first so many.

        Caches of transformers do the same; its newer versions refuse a positive number.

        Raises:
            InvalidArgumentError: What would be the last token sees some that were forgotten.
        """
        kept = tokens_to_remove
        lengths = [min(length, kept) if kept > 0 else max(length + kept, 0) for length in self.lengths]
        if self.lacks(lengths):
            raise InvalidArgumentError(
                f"tokens_to_remove={tokens_to_remove} is more than a layer with a window of {self.window} can forget"
            )
        for part in self.parts:
            part.lengths = list(lengths)

    def lacks(self, lengths: Sequence[int]) -> bool:
        """Whether texts of `lengths` could not go on, as columns that they see were forgotten."""
        return self.window is not None and max(min(lengths) - self.window + 1, 0) < self.dropped

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        for part in self.parts:
            part.lengths = [0] * len(part.lengths)
            part.dropped = 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        for part in self.parts if self.is_initialized else ():
            part.keys, part.values = part.keys[indices], part.values[indices]
            part.lengths = torch.tensor(part.lengths)[indices.cpu()].tolist()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the rows into another order."""
        self.batch_select_indices(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        for part in self.parts if self.is_initialized else ():
            part.keys, part.values = (states.repeat_interleave(repeats, dim=0) for states in (part.keys, part.values))
            part.lengths = [length for length in part.lengths for _ in range(repeats)]

    def _is_read_only(self) -> bool:
        """Whether these are tensors of inference mode, which torch lets nobody write to outside of it.

        Dynamo cannot trace the question; compiled code does not ask.
        """
        if torch.compiler.is_compiling():
            return False
        return self.keys.is_inference() and not torch.is_inference_mode_enabled()

    def _grow(self, needed: int) -> None:
        """Get room for at least `needed` tokens; by a constant factor, so that growing costs little per token."""
        if self.block is None:
            step = _FIRST_CAPACITY if self.window is None else _SCRATCH
            capacity = max(needed, step, self.keys.shape[2] + max(step, self.keys.shape[2] // _GROWTH))
        else:
            capacity = whole_blocks(needed, self.block)
        keys = self.keys.new_empty((*self.keys.shape[:2], capacity, self.keys.shape[3]))
        values = self.values.new_empty((*self.values.shape[:2], capacity, self.values.shape[3]))
        kept = self.longest - self.dropped
        if kept:
            keys[:, :, :kept] = self.keys[:, :, :kept]
            values[:, :, :kept] = self.values[:, :, :kept]
        self.keys, self.values = keys, values


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens that there is room for in as many blocks as `tokens` need."""
    return -(-tokens // block) * block


class TreeCache(Cache):  # type: ignore[misc]
    """The cache of a whole model: a `TreeLayer` for each layer, made as the model comes to it.

    Args:
        windows: The window of each layer; the last one is that of all that follow. Without any, all keep all.
        block: See `TreeLayer.block`.
    """

    def __init__(self, windows: Sequence[int | None] = (), block: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._windows = list(windows) or [None]
        self._keeps_all = True
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer; see `TreeLayer.update`."""
        layers: list[TreeLayer] = self.layers
        while len(layers) <= layer_idx:
            layers.append(TreeLayer(self._windows[min(len(layers), len(self._windows) - 1)]))
            layers[-1].keeps_all, layers[-1].block = self._keeps_all, self._block
        return layers[layer_idx].update(key_states, value_states)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """While a tree is run: what the pass writes is scratch, and stays only if it is committed."""
        self._set_keeps_all(False)
        self._make_writable()
        try:
            yield
        finally:
            self._set_keeps_all(True)

    def _set_keeps_all(self, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        for layer in self.layers:
            layer.keeps_all = keeps_all
            if layer.indexer is not None:
                layer.indexer.keeps_all = keeps_all

    def _make_writable(self) -> None:
        """Copy tensors of inference mode, which torch lets nobody write to outside of it."""
        if not torch.is_inference_mode_enabled():
            for layer in self._filled:
                if layer.keys.is_inference():
                    layer._grow(layer.longest - layer.dropped)

    @property
    def _filled(self) -> list[TreeLayer]:
        """The layers that the model has written to, and their indexers; some models have layers that borrow the states
        of others."""
        filled = [layer for layer in self.layers if layer.is_initialized]
        return filled + [layer.indexer for layer in filled if layer.indexer is not None]

    def lengths(self, batch_size: int) -> list[int]:
        """Tokens kept, per row."""
        for layer in self.layers:
            if layer.is_initialized:
                return list(layer.lengths)
        return [0] * batch_size

    def length(self, row: int) -> int:
        """Tokens kept of one row."""
        for layer in self.layers:
            if layer.is_initialized:
                return int(layer.lengths[row])
        return 0

    @property
    def allocated(self) -> int:
        """Tokens that there is room for, in each row."""
        return max((layer.keys.shape[2] for layer in self._filled), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes, in each row."""
        parts = [part for layer in self._filled for part in (layer.keys, layer.values)]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def copy_start(self, other: TreeCache, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another one, which has that many in each of its rows."""
        for index, layer in enumerate(other.layers):
            if layer.is_initialized:
                self.update(layer.keys.narrow(2, 0, tokens), layer.values.narrow(2, 0, tokens), index)
            if layer.indexer is not None:
                self.update_indexer(layer.indexer.keys[:, 0, :tokens], index)

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of `slots[row]` in every layer; see `TreeLayer.commit`."""
        filled = self._filled
        if not filled:
            return
        before, scratch = filled[0].lengths, filled[0].longest
        rows = list(zip(before, slots, strict=True))
        if all(not kept or scratch - length == len(kept) - 1 - kept[-1] == -kept[0] for length, kept in rows):
            lengths = [length + len(kept) for length, kept in rows]  # all of them lie in place
            for layer in filled:
                layer.lengths = lengths.copy()
            return
        uploads: dict[tuple[object, ...], torch.Tensor] = {}
        for layer in filled:
            layer.commit(slots, uploads)

    def settle(self) -> None:
        """Bring all layers to the same lengths, in case an interruption came between two of them."""
        filled = self._filled
        shortest = [min(lengths) for lengths in zip(*(layer.lengths for layer in filled), strict=True)]
        if any(layer.lacks(shortest) for layer in filled):
            shortest = [0] * len(shortest)
        self._cut(shortest)

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

    def saved(self) -> list[tuple[TreeLayer, dict[str, Any]]]:
        """What `restore` needs: of layers with a window all that they hold, which is replaced and not written over."""
        return [(layer, dict(vars(layer))) for layer in self._filled if layer.window is not None]

    def restore(self, lengths: Sequence[int], saved: Sequence[tuple[TreeLayer, dict[str, Any]]] = ()) -> None:
        """Forget what lies behind `lengths`, one for each row, and put back what was `saved`."""
        for layer, attributes in saved:
            for name, value in attributes.items():
                setattr(layer, name, value)
        self._cut(lengths)

    def forget(self, row: int) -> None:
        """Forget all of one row, so that its text is computed anew."""
        self._cut([0 if place == row else length for place, length in enumerate(self.lengths(0))])

    def _cut(self, lengths: Sequence[int]) -> None:
        """Leave at most so many tokens of each row."""
        for layer in self._filled:
            layer.lengths = [min(kept, length) for kept, length in zip(layer.lengths, lengths, strict=True)]
            if not any(layer.lengths):
                layer.dropped = 0
