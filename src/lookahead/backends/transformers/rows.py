"""Caches for passes over several rows: static buffers with fixed addresses, and caches of packed or padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from lookahead.backends.machine import upload
from lookahead.backends.transformers.tree_attention.packed_mask import Pages
from lookahead.backends.transformers.tree_cache import Integers, Row, TreeCache, TreeLayer, write_states


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
"""Bytes of a buffer. A copy within a larger one takes several kernels in any case, as indices have 32 bits."""


def _without_first(buffers: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return buffers without their first `count` states."""
    sizes = np.cumsum([0, *map(len, buffers)]).tolist()
    parts = [buffer[max(count - begin, 0) :] for buffer, begin in zip(buffers, sizes, strict=False)]
    return [part for part in parts if len(part)]


class StaticTreeCache(TreeCache):
    """Cache of a model with static buffers.

    States of equal size are in buffers `[states, rows, heads, capacity, size]` of several layers, which a commit moves
    together. While `columns` is set, a pass writes its nodes to these columns and gets whole buffers, with
    equal shapes and equal Python code for every step. Otherwise passes get the texts so far, with nodes after the
    longest one.

    Attributes:
        columns: Columns of the nodes in a static pass, `[nodes]` int64 on the device; `None` in other passes.
        capacity: Columns of each buffer.
        rows: Rows of each buffer.
        buffers: All memory for states.
        moves: Number of buffers that were allocated; their addresses change with it.

    Args:
        shapes: Shape of each layer's keys and values.
        texts: Number of texts.
        capacity: Initial number of columns.
        device: Device of the buffers.
        rows: Number of rows, at least `texts`; equal to it if not given.
        piece: Bytes of a buffer that has several layers.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        texts: int,
        capacity: int,
        device: torch.device,
        rows: int | None = None,
        piece: int = PIECE,
    ) -> None:
        super().__init__(texts=texts)
        self.columns: torch.Tensor | None = None
        self.rows = rows or texts
        self.buffers: list[torch.Tensor] = []
        self.capacity = self.moves = 0
        self._device = device
        self._piece = piece
        states: dict[tuple[int, int, torch.dtype], list[tuple[TreeLayer, str]]] = {}
        for index, shape in enumerate(shapes):
            layer = self.layer(index)
            if shape is not None:
                layer.dtype = shape.dtype
                layer.device = device
                layer.is_initialized = True
                states.setdefault((shape.heads, shape.key_size, shape.dtype), []).append((layer, "keys"))
                states.setdefault((shape.heads, shape.value_size, shape.dtype), []).append((layer, "values"))
        self._owners = [(kind, *owner) for kind, owners in states.items() for owner in owners]
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` columns, one after another: only one of them takes memory twice.

        References to the old buffers become stale, even if there is too little memory.

        Raises:
            torch.cuda.OutOfMemoryError: There is too little memory; the capacity has not changed.
        """
        columns = self.longest
        moved = [buffer for buffer in self.buffers if buffer.shape[3] >= capacity]  # by a call that ran out of memory
        old = self.buffers[len(moved) :]
        rest = self._owners[sum(map(len, moved)) :]
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            while rest:
                heads, size, dtype = kind = rest[0][0]
                shape = self.rows, heads, capacity, size
                count = max(self._piece // (math.prod(shape) * dtype.itemsize), 1)
                owners = [owner for owner in rest[:count] if owner[0] == kind]
                rest = rest[len(owners) :]
                # Zeros, as attention with a dense mask multiplies hidden values by 0, and 0 * NaN is NaN.
                buffer = torch.zeros((len(owners), *shape), dtype=dtype, device=self._device)
                for states, (_, layer, name) in zip(buffer, owners, strict=True):
                    if columns:
                        states[:, :, :columns] = getattr(layer, name)[:, :, :columns]
                    setattr(layer, name, states[:, :, : self.capacity])
                moved.append(buffer)
                old = _without_first(old, len(owners))
                self.buffers = [*moved, *old]
                self.moves += 1
        self.capacity = capacity
        for states, (_, layer, name) in zip(chain.from_iterable(self.buffers), self._owners, strict=True):
            setattr(layer, name, states[:, :, :capacity])

    @contextmanager
    def written_at(self, columns: torch.Tensor) -> Iterator[None]:
        """Set the columns of a static pass."""
        self.columns = columns
        try:
            yield
        finally:
            self.columns = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of one layer, `[batch, heads, nodes, size]`; return its whole buffers in a static pass."""
        if self.columns is None:
            return super().update(key_states, value_states, layer_idx)
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.columns, key_states)
        layer.values.index_copy_(2, self.columns, value_states)
        return layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest row; always 0 in a static pass.

        A captured pass repeats the value of its recording, so a model that uses it must fail the trial in any case.
        """
        return 0 if self.columns is not None else self.longest

    def move(self, texts: Integers, sources: Integers, targets: Integers) -> None:
        """Copy states of texts between columns."""
        text, source, target = upload(self._device, np.stack([texts, sources, targets]))[0]
        for buffer in self.buffers:
            buffer[:, text, :, target] = buffer[:, text, :, source]


States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class RowsCache(Cache):  # type: ignore[misc]
    """Cache argument of a pass over several rows with separate caches.

    Args:
        rows: Rows of the pass.
        counts: Number of nodes of each.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, counts, strict=True))


class PackedCache(RowsCache):
    """Cache argument for packed rows.

    `update` writes the states of each row's nodes to its cache. The attention function finds the states of all rows by
    the returned tensor.

    Attributes:
        written: States of all rows by the `id` of the key tensor that `update` returned, with this tensor.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._counts = list(counts)
        self.written: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer, and return them unchanged."""
        layers = []
        for row, _ in self._rows:
            of_row = row.cache.layers
            layers.append(of_row[layer_idx] if layer_idx < len(of_row) else row.cache.layer(layer_idx))
        if len(layers) == 1:
            states = write_states(layers, [key_states], [value_states])
        else:
            keys = torch.split(key_states, self._counts, 2)
            states = write_states(layers, keys, torch.split(value_states, self._counts, 2))
        self.written[id(key_states)] = (key_states, states)
        return key_states, value_states


class PaddedCache(RowsCache):
    """Cache argument for a padded batch of rows.

    `update` writes the states of each row's nodes to its cache, and returns a padded copy of all rows with nodes after
    the longest text; masks hide the padding.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._longest = max(row.length for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[rows, heads, nodes, head_dim]` of one layer, and return the states of all tokens."""
        padded = self._padded(key_states), self._padded(value_states)
        for place, (row, count) in enumerate(self._rows):
            keys, values = (states.narrow(0, place, 1).narrow(2, 0, count) for states in (key_states, value_states))
            self._fill(padded, place, row.cache.update(keys, values, layer_idx))
        return padded

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the keys `[rows, nodes, size]` of a layer's indexer, and return the keys of all tokens."""
        padded = self._padded(indexer_key_states[:, None])
        for place, (row, count) in enumerate(self._rows):
            keys = row.cache.update_indexer(indexer_key_states[place, None, :count], layer_idx)
            self._fill((padded,), place, (keys[:, None],))
        return padded[:, 0]

    def _padded(self, new: torch.Tensor) -> torch.Tensor:
        """Return new states `[rows, heads, longest text + nodes, head_dim]` with the nodes filled in."""
        padded = new.new_zeros((*new.shape[:2], self._longest + new.shape[2], new.shape[3]))
        padded.narrow(2, self._longest, new.shape[2]).copy_(new)
        return padded

    def _fill(self, padded: Sequence[torch.Tensor], place: int, sources: Sequence[torch.Tensor]) -> None:
        """Copy the states of a row's text."""
        row, _ = self._rows[place]
        if row.length:
            for padded_states, states in zip(padded, sources, strict=True):
                padded_states.narrow(0, place, 1).narrow(2, 0, row.length).copy_(states.narrow(2, 0, row.length))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest text."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and their first index."""
        return self._longest + query_length, 0


@dataclass(frozen=True)
class PackedRows:
    """Rows of a pass for the attention function; models pass it on as the argument `packed_rows`.

    Attributes:
        counts: Number of nodes of each row.
        masks: For each kind of layer the mask added to the scores of each row, `[1, 1, nodes, keys]`, or `None` if
            each node sees all tokens before it. Packed masks in invariant passes.
        kinds: The kind of each layer; a single kind means all layers.
        cache: The cache of the step.
        pages: Pages of rows in one shared memory. Then there is one packed mask, and `counts` is empty.
    """

    counts: list[int]
    masks: Mapping[str, Any]
    kinds: Sequence[str]
    cache: PackedCache | StaticTreeCache
    pages: Pages | None = None

    def masks_of(self, module: torch.nn.Module) -> Any:
        """Return the masks of a layer."""
        if len(self.masks) == 1:
            return self.masks[self.kinds[0]]
        layer: Any = module.layer_idx
        return self.masks[self.kinds[layer]]
