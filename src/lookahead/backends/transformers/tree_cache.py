"""A key-value cache with room for a token tree behind the decided text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.errors import InvalidArgumentError

_FIRST_CAPACITY = 256


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one model layer.

    While a tree is run the forward pass writes its nodes behind the longest row, as scratch.
    `commit` keeps the accepted ones, each row contiguous from its start, and the next pass overwrites the
    rest. Rows may have different lengths; what lies behind the end of a row is hidden from it by the
    attention mask. At other times the layer works as any cache of transformers: what is written is kept.

    Attributes:
        keys: `[batch, heads, capacity, head_dim]`; `values` likewise.
        lengths: Tokens kept, per row; empty before the first pass.
        keeps_all: Whether `update` keeps what it writes, without a `commit`.
        block: Tokens by which it grows; by half of what it has, if `None`.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.keeps_all = True
        self.block: int | None = None

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
        start = self.longest
        end = start + key_states.shape[2]
        if self.keeps_all and min(self.lengths) < start:
            raise InvalidArgumentError(
                f"past_key_values holds {self.lengths} tokens in its rows; only lookahead decoding can go on from "
                "rows of different lengths"
            )
        # While a tree is run, `scratch` has seen to it that the tensors can be written to.
        if end > self.keys.shape[2] or (self.keeps_all and self._is_read_only()):
            self._grow(end)
        if self.keeps_all:
            self.lengths = [end] * len(self.lengths)
        # `narrow` does what a slice does, in a third of the time
        self.keys.narrow(2, start, end - start).copy_(key_states)
        self.values.narrow(2, start, end - start).copy_(value_states)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of `slots[row]`, ascending places in the scratch, behind each row's text.

        Only states that lie in the wrong place are copied, so an accepted path that is contiguous costs nothing.
        """
        scratch = self.longest
        for row, kept in enumerate(slots):
            target = self.lengths[row]
            settled = 0
            while settled < len(kept) and scratch + kept[settled] == target + settled:
                settled += 1
            if settled < len(kept):
                source = torch.tensor([scratch + slot for slot in kept[settled:]], device=self.keys.device)
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
        return self.longest + query_length, 0

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row (a negative number, as in transformers)."""
        self.lengths = [max(length + min(tokens_to_remove, 0), 0) for length in self.lengths]

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.lengths = [0] * len(self.lengths)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.lengths = torch.tensor(self.lengths)[indices.cpu()].tolist()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the rows into another order."""
        self.batch_select_indices(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.is_initialized:
            self.keys, self.values = (states.repeat_interleave(repeats, dim=0) for states in (self.keys, self.values))
            self.lengths = [length for length in self.lengths for _ in range(repeats)]

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
            capacity = max(needed, _FIRST_CAPACITY, self.keys.shape[2] * 3 // 2)
        else:
            capacity = whole_blocks(needed, self.block)
        keys = self.keys.new_empty((*self.keys.shape[:2], capacity, self.keys.shape[3]))
        values = self.values.new_empty((*self.values.shape[:2], capacity, self.values.shape[3]))
        kept = self.longest
        keys[:, :, :kept] = self.keys[:, :, :kept]
        values[:, :, :kept] = self.values[:, :, :kept]
        self.keys, self.values = keys, values


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens that there is room for in as many blocks as `tokens` need."""
    return -(-tokens // block) * block


class TreeCache(Cache):  # type: ignore[misc]
    """The cache of a whole model: a `TreeLayer` for each layer, made as the model comes to it.

    Args:
        block: See `TreeLayer.block`.
    """

    def __init__(self, block: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._keeps_all = True
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer; see `TreeLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeLayer())
            self.layers[-1].keeps_all, self.layers[-1].block = self._keeps_all, self._block
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """While a tree is run: what the pass writes is scratch, and stays only if it is committed."""
        self._set_keeps_all(False)
        try:
            yield
        finally:
            self._set_keeps_all(True)

    def _set_keeps_all(self, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        for layer in self.layers:
            layer.keeps_all = keeps_all
            if not keeps_all and layer.is_initialized and layer._is_read_only():
                layer._grow(layer.longest)

    @property
    def _filled(self) -> list[TreeLayer]:
        """The layers that the model has written to; some models have layers that borrow the states of others."""
        return [layer for layer in self.layers if layer.is_initialized]

    def lengths(self, batch_size: int) -> list[int]:
        """Tokens kept, per row."""
        filled = self._filled
        return list(filled[0].lengths) if filled else [0] * batch_size

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

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of `slots[row]` in every layer; see `TreeLayer.commit`."""
        for layer in self._filled:
            layer.commit(slots)

    def settle(self) -> None:
        """Bring all layers to the same lengths, in case an interruption came between two of them."""
        filled = self._filled
        shortest = [min(lengths) for lengths in zip(*(layer.lengths for layer in filled), strict=True)]
        for layer in filled:
            layer.lengths = list(shortest)

    def restore(self, lengths: Sequence[int]) -> None:
        """Forget what lies behind `lengths`, one for each row."""
        for layer in self._filled:
            layer.lengths = [min(kept, length) for kept, length in zip(layer.lengths, lengths, strict=True)]

    def forget(self, row: int) -> None:
        """Forget all of one row, so that its text is computed anew."""
        for layer in self._filled:
            layer.lengths[row] = 0
