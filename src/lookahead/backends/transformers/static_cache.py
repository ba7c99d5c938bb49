"""Keys and values of several texts in static buffers: no step allocates, and they stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache

from lookahead.backends.transfers import upload
from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer


@dataclass(frozen=True)
class LayerShape:
    """Sizes of what one layer keeps of a token.

    Attributes:
        heads: Heads of keys and values.
        key_size: Numbers of a key, per head.
        value_size: Numbers of a value, per head.
        dtype: Number type of keys and values.
    """

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


class StaticTreeCache(Cache):  # type: ignore[misc]
    """The cache of a model for the texts of its rows, up to a length known beforehand.

    States of one size lie in one buffer `[states, rows, heads, capacity, size]` over all layers, so that what a commit
    moves is moved in all of them at once. While `columns` is set, a pass writes its nodes to those columns and gets
    whole buffers back, whatever the length of the text: the same shapes and the same work in Python for every step.
    Without it, passes see the texts so far; their nodes lie behind the longest one.

    Attributes:
        lengths: Tokens of each text.
        columns: Columns that a static pass writes to, `[nodes]` int64 on the device; `None` in other passes.
        capacity: Columns of each buffer.
        batch: Rows that hold texts.
        rows: Rows of the buffers.

    Args:
        shapes: What each layer keeps of a token.
        batch: As above.
        capacity: As above.
        device: Where the buffers are.
        rows: As above, if more than hold texts.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        batch: int,
        capacity: int,
        device: torch.device,
        rows: int | None = None,
    ) -> None:
        super().__init__(layers=[TreeLayer() for _ in shapes])
        self.columns: torch.Tensor | None = None
        self.capacity = 0
        self.batch = batch
        self.rows = rows or batch
        self._shapes = tuple(shapes)
        self._device = device
        self._buffers: list[torch.Tensor] = []
        for layer, shape in zip(self.layers, shapes, strict=True):
            if shape is not None:
                layer.dtype, layer.device, layer.is_initialized = shape.dtype, device, True
        self.lengths = [0] * batch
        self.grow(capacity)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All memory for states, each `[states, rows, heads, capacity, size]`."""
        return tuple(self._buffers)

    @property
    def longest(self) -> int:
        """Length of the longest row: where the scratch begins."""
        return max(self.lengths)

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` columns. References to the old buffers become stale."""
        kept = self.longest
        sizes: dict[tuple[int, int, torch.dtype], list[tuple[TreeLayer, str]]] = {}
        for layer, shape in zip(self.layers, self._shapes, strict=True):
            if shape is not None:
                sizes.setdefault((shape.heads, shape.key_size, shape.dtype), []).append((layer, "keys"))
                sizes.setdefault((shape.heads, shape.value_size, shape.dtype), []).append((layer, "values"))
        self._buffers = []
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for (heads, size, dtype), owners in sizes.items():
                # Zeros, as attention with a dense mask multiplies hidden values by 0, and 0 * NaN is NaN.
                buffer = torch.zeros((len(owners), self.rows, heads, capacity, size), dtype=dtype, device=self._device)
                for states, (layer, name) in zip(buffer, owners, strict=True):
                    if kept:
                        states[:, :, :kept] = getattr(layer, name)[:, :, :kept]
                    setattr(layer, name, states)
                self._buffers.append(buffer)
        self.capacity = capacity

    def fill(self) -> None:
        """Count all columns as those of a text: whoever writes to `columns` knows which are."""
        self._set_lengths([self.capacity] * self.batch)

    def crop(self, tokens: int, row: int | None = None) -> None:
        """Forget all behind the first `tokens` tokens, of one row or of all."""
        rows = range(self.batch) if row is None else [row]
        self._set_lengths([min(own, tokens) if place in rows else own for place, own in enumerate(self.lengths)])

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
            return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]
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

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of `slots[row]` in every layer, behind the row's text; only misplaced states are copied."""
        lengths, scratch = self.lengths, self.longest
        rows, sources, targets = [], [], []
        for row, kept in enumerate(slots):
            for target, slot in enumerate(kept, start=lengths[row]):
                if scratch + slot != target:
                    rows.append(row)
                    sources.append(scratch + slot)
                    targets.append(target)
        self.move(rows, sources, targets)
        # Last, so that an interruption leaves a shorter text, and never one with wrong states.
        self._set_lengths([length + len(kept) for length, kept in zip(lengths, slots, strict=True)])

    def move(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states in some columns of some rows to others."""
        if len(rows):
            row, source, target = upload(self._device, np.array([rows, sources, targets]))[0]
            for buffer in self._buffers:
                buffer[:, row, :, target] = buffer[:, row, :, source]

    def adopt(self, texts: Sequence[TreeCache]) -> None:
        """Begin with what other caches hold, one for each row, of at most `capacity` tokens; nothing else is left."""
        for row, cache in enumerate(texts):
            for layer, own in zip(cache.layers, self.layers, strict=False):
                if layer.is_initialized:
                    # What a sliding layer has forgotten is hidden by its window.
                    columns, count = slice(layer.dropped, cache.length), cache.length - layer.dropped
                    own.keys[row, :, columns] = layer.keys[0, :, :count]
                    own.values[row, :, columns] = layer.values[0, :, :count]
        self._set_lengths([cache.length for cache in texts])

    def text(self, row: int) -> TreeCache:
        """What is kept of one row, in memory of its own."""
        cache, place, length = TreeCache(), slice(row, row + 1), self.lengths[row]
        for layer in self.layers:
            held = TreeLayer()
            if layer.is_initialized:
                keys, values = (states[place, :, :length].clone() for states in (layer.keys, layer.values))
                held = TreeLayer.holding(keys, values, length)
            cache.layers.append(held)
        return cache

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for layer in self.layers:
            layer.length = self.longest  # where scratch begins
