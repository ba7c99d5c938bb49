"""What a static pass reads, in buffers that stay where they are: one for the host to fill, one on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.tree_attention.packed_mask import (
    BITS,
    FIRST,
    SCRATCH,
    VISIBLE,
    WORD,
    first_position,
    packed_width,
)
from lookahead.core.token_tree import Layout


class StaticInputs:
    """The inputs of passes of one size.

    Everything that changes from step to step is in one int32 array, so that one copy brings it to the device. On a CPU
    the host's array is the device's. Trees with fewer nodes are padded: a padding node is token 0 at position 0, sees
    itself alone, and is seen by nobody.

    Args:
        masks: Which kinds of layers the model has.
        batch: Rows.
        nodes: Nodes of each row, the padding included.
        device: Where the model is.
        most: Nodes of the largest tree, if that may be more: passes then read it part by part.

    Attributes:
        tokens: `[batch, nodes]` int32.
        positions: `[batch, nodes]` int32.
        columns: Columns of the cache where the nodes go, `[nodes]` int32.
        packed_masks: For each kind of layer `[batch, 1, nodes, 3 + ceil(most / 32)]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, batch: int, nodes: int, device: torch.device, most: int | None = None
    ) -> None:
        passes = -(-(most or nodes) // nodes)
        width = packed_width(passes * nodes)
        shapes = [(batch, nodes), (batch, nodes), (nodes,), *[(batch, 1, nodes, width)] * len(masks.kinds)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        on_host = device.type == "cpu"
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False):
            self._host = torch.zeros(sum(sizes), dtype=torch.int32)
            self._staged = self._host if on_host else torch.zeros_like(self._host, device=device, pin_memory=False)
            parts = [part.view(shape) for part, shape in zip(torch.split(self._staged, sizes), shapes, strict=True)]
        self.nodes = nodes
        self.tokens, self.positions, self.columns = parts[:3]
        self.packed_masks = tuple(parts[3:])
        self._masks = masks
        places = np.cumsum([0, *sizes])
        own = [
            self._host.numpy()[start : start + size].reshape(shape)
            for start, size, shape in zip(places, sizes, shapes, strict=False)
        ]
        self._tokens, self._positions, self._columns, *self._packed = own
        # The bit of each slot for itself, which is all that a padding node sees.
        self._alone = [
            np.packbits(np.eye(nodes, (width - BITS) * WORD, start, dtype=np.bool_), axis=1, bitorder="little")
            for start in range(0, passes * nodes, nodes)
        ]
        self._offsets = np.arange(nodes, dtype=np.int32)

    def stage(self, layouts: Sequence[Layout], lengths: Sequence[int], shifts: Sequence[int], part: int = 0) -> None:
        """Bring one step, or a part of it, to the device.

        Args:
            layouts: The trees, of at most `nodes` nodes, or `most`; one for each row. Rows that have none are padding.
            lengths: Cached tokens of each row.
            shifts: What is added to places in the text to have positions, for each row.
            part: Which `nodes` slots of the trees.
        """
        scratch, start = max(lengths), part * self.nodes
        np.add(self._offsets, scratch + start, out=self._columns)
        for packed in self._packed:
            packed[:, 0, :, VISIBLE : FIRST + 1] = 0
            packed[:, 0, :, SCRATCH] = scratch
            packed[:, 0, :, BITS:] = self._alone[part].view("<i4")
        for row, (layout, length, shift) in enumerate(zip(layouts, lengths, shifts, strict=True)):
            self._stage_row(row, layout, slice(start, start + self.nodes), length, shift)
        if self._staged is not self._host:
            # Pinned memory of its own, which is not given to others until the copy is done: nobody waits for that.
            sent = torch.empty_like(self._host, pin_memory=self._staged.is_cuda).copy_(self._host)
            self._staged.copy_(sent, non_blocking=True)

    def _stage_row(self, row: int, layout: Layout, part: slice, length: int, shift: int) -> None:
        tokens, depths = layout.tokens[part], layout.depths[part]
        own = len(tokens)
        self._tokens[row, :own], self._tokens[row, own:] = tokens, 0
        # A finished row has no position; behind its text the model might have no position.
        has_position = len(layout.read_slots) > 0
        start = length if has_position else 0
        positions, all_positions = start + depths, start + layout.depths
        self._positions[row, :own], self._positions[row, own:] = positions + (shift if has_position else 0), 0
        ancestors = layout.ancestor_mask()[part]
        for kind, packed in zip(self._masks.kinds, self._packed, strict=True):
            own_rows = packed[row, 0, :own]
            own_rows[:, VISIBLE] = length
            window, chunk = self._masks.reach(kind)
            seen = ancestors
            if window is not None or chunk is not None:
                own_rows[:, FIRST] = first = first_position(positions, window, chunk)
                seen = ancestors & (all_positions >= first[:, None])
            bits = np.packbits(seen, axis=1, bitorder="little")
            own_rows[:, BITS:].view(np.uint8)[:, : bits.shape[1]] = bits
