"""A tree cache with static buffers: no step allocates, and keys and values stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

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


class StaticTreeCache(TreeCache):
    """A `TreeCache` for texts up to a length known beforehand.

    States of one size lie in one buffer `[states, rows, heads, capacity, size]` over all layers, so that what a commit
    moves is moved in all of them at once. While `columns` is set, a pass writes its nodes to those columns and gets
    whole buffers back, whatever the length of the text: the same shapes and the same work in Python for every step.
    Without it, passes see the text so far, as those of any tree cache do.

    Attributes:
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
        super().__init__()
        self.columns: torch.Tensor | None = None
        self.capacity = 0
        self.batch = batch
        self.rows = rows or batch
        self._shapes = tuple(shapes)
        self._device = device
        self._buffers: list[torch.Tensor] = []
        for shape in shapes:
            layer = TreeLayer()
            self.layers.append(layer)
            if shape is not None:
                layer.dtype, layer.device = shape.dtype, device
                layer.lengths = [0] * batch
                layer.is_initialized = True
        self.grow(capacity)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All memory for states, each `[states, rows, heads, capacity, size]`."""
        return tuple(self._buffers)

    @property
    def longest(self) -> int:
        """Length of the longest row: where the scratch begins."""
        return max(self.lengths(self.batch))

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
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
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
        lengths = self.lengths(self.batch)
        scratch = max(lengths)
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

    def adopt(self, cache: TreeCache) -> None:
        """Begin with the contents of another cache, of at most `capacity` tokens; nothing else is left."""
        lengths = cache.lengths(self.batch)
        longest = max(lengths)
        for layer, own in zip(cache.layers, self.layers, strict=False):
            if layer.is_initialized:
                # What a sliding layer has forgotten is hidden by its window.
                columns = slice(layer.dropped, longest)
                own.keys[: self.batch, :, columns] = layer.keys[:, :, : longest - layer.dropped]
                own.values[: self.batch, :, columns] = layer.values[:, :, : longest - layer.dropped]
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        for layer in self._filled:
            layer.lengths = list(lengths)
