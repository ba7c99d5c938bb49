"""Keys and values of many texts in pages of one memory with fixed addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from transformers.cache_utils import Cache

from lookahead.backends.base import TextRow
from lookahead.backends.machine import upload
from lookahead.backends.transformers.tree_cache import Integers, Row, TreeCache, TreeLayer, whole_blocks
from lookahead.errors import LookaheadError


@dataclass(frozen=True)
class LayerShape:
    """Shape of a layer's keys and values: number of heads, sizes of a key and of a value, and their type."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


def layer_shapes(cache: TreeCache) -> tuple[LayerShape | None, ...]:
    """Return the shapes of a filled cache; `None` for layers with the states of other layers."""
    return tuple(
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
        if layer.is_initialized
        else None
        for layer in cache.layers
    )


PIECE = 2 << 30
"""Bytes of a buffer of several layers. A copy within a larger one takes several kernels, as indices have 32 bits."""


def _without_first(buffers: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return buffers without their first `count` states."""
    sizes = np.cumsum([0, *map(len, buffers)]).tolist()
    parts = [buffer[max(count - begin, 0) :] for buffer, begin in zip(buffers, sizes, strict=False)]
    return [part for part in parts if len(part)]


class RowPool(Cache):  # type: ignore[misc]
    """Keys and values of many texts in pages of one memory, and the cache argument of passes over them.

    States of equal size are in buffers `[states, 1, heads, columns, size]` of several layers, which a commit moves
    together. A pass writes its nodes to some columns and gets whole buffers, with equal shapes and equal Python code
    for every step.

    Page 0 is for padding nodes. Each text has a number, the index of its length and its pages in arrays. Texts with a
    common beginning share its pages: only the end of a text is written, and its last page is its own.

    Args:
        shapes: Shapes of keys and values in each layer.
        tokens: Initial capacity in tokens; it grows on demand.
        block: Tokens of a page.
        device: Device of the memory.
        is_slice: Whether there is only one text, which has all pages but the first in order: layers see only its part.

    Attributes:
        block, device, is_slice: The arguments.
        columns: Columns of the nodes of the pass, `[nodes]` int64 on the device; `None` between passes.
        buffers: All memory for states.
        moves: Number of buffers that were allocated; their addresses change with it.
        free: Free pages.
        uses: Number of texts that hold each page, `[pages]`.
        text_lengths: Tokens of each text, `[texts]`.
        page_counts: Number of pages of each text, `[texts]`; -1 for numbers without a text.
        page_table: Pages of each text in the order of its tokens, `[texts, pages]` int32.
    """

    def __init__(
        self, shapes: Sequence[LayerShape | None], tokens: int, block: int, device: torch.device, is_slice: bool = False
    ) -> None:
        super().__init__(layers=[TreeLayer() for _ in shapes])
        self.block = block
        self.is_slice = is_slice
        self.columns: torch.Tensor | None = None
        self.buffers: list[torch.Tensor] = []
        self.moves = 0
        self.device = device
        states: dict[tuple[int, int, torch.dtype], list[tuple[TreeLayer, str]]] = {}
        for layer, shape in zip(self.layers, shapes, strict=True):
            if shape is not None:
                layer.is_initialized = True
                states.setdefault((shape.heads, shape.key_size, shape.dtype), []).append((layer, "keys"))
                states.setdefault((shape.heads, shape.value_size, shape.dtype), []).append((layer, "values"))
        self._owners = [(kind, *owner) for kind, owners in states.items() for owner in owners]
        pages = 1 + -(-tokens // block)
        self.grow(pages * block)
        self.free = list(range(pages - 1, 0, -1))
        self.uses = np.zeros(pages, dtype=np.int64)
        self.text_lengths, self.page_counts = np.zeros((2, 0), dtype=np.int64)
        self.page_table = np.zeros((0, 1), dtype=np.int32)

    @property
    def capacity(self) -> int:
        """Columns of each buffer."""
        return self.buffers[-1].shape[3] if self.buffers else 0

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` columns, one after another: only one of them takes memory twice.

        References to the old buffers become stale, even if there is too little memory.

        Raises:
            torch.cuda.OutOfMemoryError: There is too little memory; the capacity has not changed.
        """
        columns = self.capacity
        moved = [buffer for buffer in self.buffers if buffer.shape[3] >= capacity]  # by a call that ran out of memory
        old = self.buffers[len(moved) :]
        rest = self._owners[sum(map(len, moved)) :]
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            while rest:
                heads, size, dtype = kind = rest[0][0]
                shape = 1, heads, capacity, size
                count = max(PIECE // (math.prod(shape) * dtype.itemsize), 1)
                owners = [owner for owner in rest[:count] if owner[0] == kind]
                rest = rest[len(owners) :]
                # Zeros, as attention with a dense mask multiplies hidden values by 0, and 0 * NaN is NaN.
                buffer = torch.zeros((len(owners), *shape), dtype=dtype, device=self.device)
                for states, (_, layer, name) in zip(buffer, owners, strict=True):
                    if columns:
                        states[:, :, :columns] = getattr(layer, name)[:, :, :columns]
                    setattr(layer, name, states[:, :, :columns])
                moved.append(buffer)
                old = _without_first(old, len(owners))
                self.buffers = [*moved, *old]
                self.moves += 1
        for states, (_, layer, name) in zip(chain.from_iterable(self.buffers), self._owners, strict=True):
            setattr(layer, name, states[:, :, :capacity])

    @contextmanager
    def written_at(self, columns: torch.Tensor) -> Iterator[None]:
        """Set the columns of a pass."""
        self.columns = columns
        try:
            yield
        finally:
            self.columns = None

    @property
    def first_visible(self) -> int:
        """First column that attention reads."""
        return self.block if self.is_slice else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer, `[1, heads, nodes, size]`; return the visible columns."""
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.columns, key_states)
        layer.values.index_copy_(2, self.columns, value_states)
        return self.visible(layer)

    def visible(self, layer: TreeLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer that attention reads."""
        return layer.keys[:, :, self.first_visible :], layer.values[:, :, self.first_visible :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: a captured pass repeats the value of its recording, so a model that uses it fails the trial."""
        return 0

    def move(self, sources: Integers, targets: Integers) -> None:
        """Copy states between columns."""
        source, target = upload(self.device, np.stack([sources, targets]))[0]
        for buffer in self.buffers:
            buffer[:, 0, :, target] = buffer[:, 0, :, source]

    def add_text(self) -> int:
        """Add an empty text, and return its number."""
        if not (self.page_counts < 0).any():
            more = max(len(self.page_counts), 8)
            self.text_lengths = np.pad(self.text_lengths, (0, more))
            self.page_counts = np.pad(self.page_counts, (0, more), constant_values=-1)
            self.page_table = np.pad(self.page_table, ((0, more), (0, 0)))
        number = int(self.page_counts.argmin())
        self.text_lengths[number] = self.page_counts[number] = 0
        return number

    def remove_text(self, number: int) -> None:
        """Free the pages of a text, and its number."""
        self.shorten(number, 0)
        self.page_counts[number] = -1

    def begin(self, number: int, source: int, tokens: int) -> None:
        """Begin an empty text with the first tokens of another one.

        Whole pages are shared and the rest is copied, unless there is no free page for it.
        """
        self.shorten(number, 0)
        whole = tokens // self.block
        pages = self.page_table[source, :whole]
        self.page_table[number, :whole] = pages
        self.page_counts[number] = whole
        self.uses[pages] += 1
        places = np.arange(whole * self.block, tokens if self.free else whole * self.block)
        if len(places):
            self.reserve(np.array([number]), np.array([tokens]))
            self.move(self.columns_of(source, places), self.columns_of(number, places))
        self.text_lengths[number] = whole * self.block + len(places)

    def shorten(self, number: int, tokens: int) -> None:
        """Keep the first tokens of a text, or fewer: no part of a page that other texts hold."""
        whole = tokens // self.block
        if tokens % self.block and self.uses[self.page_table[number, whole]] > 1:
            tokens = whole * self.block
        count = -(-tokens // self.block)
        pages = self.page_table[number, count : self.page_counts[number]]
        self.uses[pages] -= 1
        self.free += pages[self.uses[pages] == 0][::-1].tolist()  # pages of a single text stay in order
        self.page_counts[number] = count
        self.text_lengths[number] = tokens

    def shared(self, numbers: Integers, with_others: bool) -> int:
        """Return the number of repeated pages of some texts; see `Runner.shared_tokens`."""
        tables = self.page_table[numbers]
        held = tables[np.arange(tables.shape[1]) < self.page_counts[numbers][:, None]]
        uses = self.uses
        counts = np.bincount(held, minlength=len(uses))
        own = (counts == uses) & (counts > 0) if with_others else counts > 0
        return len(held) - int(np.count_nonzero(own))

    def reserve(self, numbers: Integers, tokens: Integers) -> None:
        """Reserve pages for a number of tokens of each text."""
        for place in np.flatnonzero(tokens > self.page_counts[numbers] * self.block).tolist():
            number = int(numbers[place])
            begin = int(self.page_counts[numbers[place]])
            end = whole_blocks(int(tokens[place]), self.block) // self.block
            if end > self.page_table.shape[1]:
                self.page_table = np.pad(self.page_table, ((0, 0), (0, end)))
            self.page_table[number, begin:end] = taken = self._take(end - begin)
            self.uses[taken] = 1
            self.page_counts[number] = end

    def _take(self, count: int) -> list[int]:
        """Take free pages, and grow the pool if there are too few."""
        if count > len(self.free) and not self.add_pages(count - len(self.free)):
            raise LookaheadError(
                f"the device has too little memory for the keys and values of {count * self.block} more tokens of a "
                "text; use shorter texts, or a model of a smaller number type"
            )
        return [self.free.pop() for _ in range(count)]

    def add_pages(self, count: int) -> bool:
        """Add at least `count` free pages, by at least half if there is memory; return whether there is enough."""
        before = self.capacity // self.block
        for more in sorted({max(count, before // 2), count}, reverse=True):
            with suppress(torch.cuda.OutOfMemoryError):
                self.grow((before + more) * self.block)
                self.free[:0] = range(before + more - 1, before - 1, -1)
                self.uses = np.append(self.uses, np.zeros(more, dtype=np.int64))
                return True
        return False

    def columns_of(self, numbers: Integers | int, places: Integers) -> Integers:
        """Return the columns of tokens, given their texts and indices."""
        if self.is_slice:
            return self.block + places
        pages: Integers = self.page_table[numbers, places // self.block].astype(np.int64)
        return pages * self.block + places % self.block


class PooledRow(TextRow):
    """One text in a pool; `number` is its number there, `padding` as in `Row`."""

    padding = 0

    def __init__(self, pool: RowPool, shift: int = 0) -> None:
        self._pool = pool
        self.shift = shift
        self.number = pool.add_text()

    def __del__(self) -> None:
        self._pool.remove_text(self.number)

    @property
    def length(self) -> int:
        """Tokens with keys and values."""
        return int(self._pool.text_lengths[self.number])

    @length.setter
    def length(self, tokens: int) -> None:
        self._pool.text_lengths[self.number] = tokens

    @property
    def capacity(self) -> int:
        """Capacity in tokens."""
        return int(self._pool.page_counts[self.number]) * self._pool.block

    def copy_start(self, other: PooledRow, tokens: int) -> None:
        """Share the pages of the first `tokens` tokens of another row; see `RowPool.begin`."""
        self._pool.begin(self.number, other.number, tokens)

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` tokens, or a few more: see `RowPool.shorten`."""
        if tokens < self.length:
            self._pool.shorten(self.number, tokens)

    def adopt(self, text: Row) -> None:
        """Copy a row with its own cache."""
        self._pool.reserve(np.array([self.number]), np.array([text.length]))
        columns = self._columns(text.length)
        for layer, pooled in zip(text.cache.layers, self._pool.layers, strict=False):
            if layer.is_initialized:
                for states, source in ((pooled.keys, layer.keys), (pooled.values, layer.values)):
                    part = source[:, :, : text.length - layer.dropped]
                    states.index_copy_(2, columns[layer.dropped :], part.to(states.dtype))
        self.length = text.length

    def copied(self) -> Row:
        """Return a copy with its own cache."""
        columns = self._columns(self.length)
        row = Row()
        for layer in self._pool.layers:
            states = (layer.keys[:, :, columns], layer.values[:, :, columns]) if layer.is_initialized else None
            row.cache.layers.append(TreeLayer() if states is None else TreeLayer.holding(*states, self.length))
        row.cache.set_length(self.length)
        return row

    def _columns(self, tokens: int) -> torch.Tensor:
        """Return the columns of the first tokens."""
        columns = self._pool.columns_of(self.number, np.arange(tokens))
        return upload(self._pool.device, columns)[0]
