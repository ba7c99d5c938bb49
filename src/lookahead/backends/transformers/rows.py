"""Caches for passes over several rows: static buffers, where no step allocates and everything stays where it is, and
what stands for the caches of rows that lie one after another, or beside one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from lookahead.backends.machine import upload
from lookahead.backends.transformers.tree_attention.packed_mask import Pages
from lookahead.backends.transformers.tree_cache import Integers, Row, TreeCache, TreeLayer


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: heads, numbers of a key and of a value per head, and their type."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


def layer_shapes(cache: TreeCache) -> tuple[LayerShape | None, ...]:
    """The shapes of a cache that the model has written to; `None` for layers that borrow the states of others."""
    return tuple(
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
        if layer.is_initialized
        else None
        for layer in cache.layers
    )


class StaticTreeCache(TreeCache):
    """The cache of a model for its texts, up to a length known beforehand.

    States of one size lie in one buffer `[states, rows, heads, capacity, size]` over all layers, so that what a commit
    moves is moved in all of them at once. While `columns` is set, a pass writes its nodes to those columns and gets
    whole buffers back, whatever the length of the text: the same shapes and the same work in Python for every step.
    Without it, passes see the texts so far; their nodes lie behind the longest one.

    Attributes:
        columns: Columns that a static pass writes to, `[nodes]` int64 on the device; `None` in other passes.
        capacity, rows: Columns and rows of each buffer.
        buffers: All memory for states.

    Args:
        shapes: What each layer keeps of a token.
        texts: How many there are; `rows` may be more than hold texts.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        texts: int,
        capacity: int,
        device: torch.device,
        rows: int | None = None,
    ) -> None:
        super().__init__(texts=texts)
        self.columns: torch.Tensor | None = None
        self.rows = rows or texts
        self.buffers: list[torch.Tensor] = []
        self._shapes = tuple(shapes)
        self._device = device
        for index, shape in enumerate(shapes):
            layer = self.layer(index)
            if shape is not None:
                layer.dtype = shape.dtype
                layer.device = device
                layer.is_initialized = True
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` columns. References to the old buffers become stale."""
        kept = self.longest
        sizes: dict[tuple[int, int, torch.dtype], list[tuple[TreeLayer, str]]] = {}
        for layer, shape in zip(self.layers, self._shapes, strict=True):
            if shape is not None:
                sizes.setdefault((shape.heads, shape.key_size, shape.dtype), []).append((layer, "keys"))
                sizes.setdefault((shape.heads, shape.value_size, shape.dtype), []).append((layer, "values"))
        self.buffers = []
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for (heads, size, dtype), owners in sizes.items():
                # Zeros, as attention with a dense mask multiplies hidden values by 0, and 0 * NaN is NaN.
                buffer = torch.zeros((len(owners), self.rows, heads, capacity, size), dtype=dtype, device=self._device)
                for states, (layer, name) in zip(buffer, owners, strict=True):
                    if kept:
                        states[:, :, :kept] = getattr(layer, name)[:, :, :kept]
                    setattr(layer, name, states)
                self.buffers.append(buffer)
        self.capacity = capacity

    @contextmanager
    def written_at(self, columns: torch.Tensor) -> Iterator[None]:
        """For a static pass, which writes to these columns."""
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
        """Tokens kept in the longest row.

        In a static pass 0, always: a captured pass keeps what Python said once, so that a model that goes by this
        must fail the check pass, whether or not that pass is captured.
        """
        return 0 if self.columns is not None else self.longest

    def move(self, texts: Integers, sources: Integers, targets: Integers) -> None:
        """See `TreeCache.move`."""
        text, source, target = upload(self._device, np.stack([texts, sources, targets]))[0]
        for buffer in self.buffers:
            buffer[:, text, :, target] = buffer[:, text, :, source]


States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class RowsCache(Cache):  # type: ignore[misc]
    """What a model takes for its cache in one pass over several rows, each of which has its own.

    Args:
        rows: The rows of the pass.
        counts: Nodes of each.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, counts, strict=True))


class PackedCache(RowsCache):
    """The rows lie one after another in one row of tokens.

    `update` sends the states of each row's nodes to the cache of that row. What it returns stands for them: the
    attention function finds by it what each row sees.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._states: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer; returns them as they are."""
        states = []
        start = 0
        for row, count in self._rows:
            keys = key_states
            values = value_states
            if len(self._rows) > 1:  # `narrow` does what a slice does, in a third of the time
                keys = keys.narrow(2, start, count)
                values = values.narrow(2, start, count)
            layers = row.cache.layers
            layer = layers[layer_idx] if layer_idx < len(layers) else row.cache.layer(layer_idx)
            states.append(layer.update(keys, values))
            start += count
        # Held with the tensor that stands for them, so that its identity stays its own.
        self._states[id(key_states)] = (key_states, states)
        return key_states, value_states

    def states(self, keys: torch.Tensor) -> States | None:
        """What `update` wrote when it returned `keys`; `None` for a tensor that it did not return."""
        found = self._states.get(id(keys))
        return None if found is None else found[1]


class PaddedCache(RowsCache):
    """The rows are those of a batch, padded to the largest.

    `update` writes the states of each row's nodes to the cache of that row, and returns a copy of all rows: the nodes
    stand behind the longest text, and what lies between is hidden by the mask.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._longest = max(row.length for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[rows, heads, nodes, head_dim]` of one layer; returns those of all tokens and nodes."""
        padded = self._padded(key_states), self._padded(value_states)
        for place, (row, count) in enumerate(self._rows):
            keys, values = (states.narrow(0, place, 1).narrow(2, 0, count) for states in (key_states, value_states))
            self._fill(padded, place, row.cache.update(keys, values, layer_idx))
        return padded

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The same for the keys `[rows, nodes, size]` of the indexer of one layer."""
        padded = self._padded(indexer_key_states[:, None])
        for place, (row, count) in enumerate(self._rows):
            found = row.cache.update_indexer(indexer_key_states[place, None, :count], layer_idx)
            self._fill((padded,), place, (found[:, None],))
        return padded[:, 0]

    def _padded(self, new: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, longest text + nodes, head_dim]`, with the states of the nodes in it."""
        padded = new.new_zeros((*new.shape[:2], self._longest + new.shape[2], new.shape[3]))
        padded.narrow(2, self._longest, new.shape[2]).copy_(new)
        return padded

    def _fill(self, padded: Sequence[torch.Tensor], place: int, found: Sequence[torch.Tensor]) -> None:
        """Add those of the text of a row."""
        row, _ = self._rows[place]
        if row.length:
            for padded_states, states in zip(padded, found, strict=True):
                padded_states.narrow(0, place, 1).narrow(2, 0, row.length).copy_(states.narrow(2, 0, row.length))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens kept of the longest text."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a query sees, and where they begin."""
        return self._longest + query_length, 0


@dataclass(frozen=True)
class PackedRows:
    """Rows of a pass, for the attention function; models hand it through as the argument `packed_rows`.

    Attributes:
        bounds: Where the nodes of each row begin and end.
        masks: For each kind of layer the mask added to the scores of each row, `[1, 1, nodes, keys]`, or `None` if
            each node sees all tokens before it. Packed masks in invariant passes.
        kinds: The kind of each layer; a single kind means all layers.
        cache: The cache of the step.
        pages: Where the rows lie that share one memory. The masks are one packed mask then, and there are no bounds.
    """

    bounds: Sequence[tuple[int, int]]
    masks: Mapping[str, Any]
    kinds: Sequence[str]
    cache: PackedCache | StaticTreeCache
    pages: Pages | None = None

    def masks_of(self, module: torch.nn.Module) -> Any:
        """The masks of a layer."""
        if len(self.masks) == 1:
            return self.masks[self.kinds[0]]
        layer: Any = module.layer_idx
        return self.masks[self.kinds[layer]]
