"""Packed masks: the visible tokens of each node of a token tree, in a few numbers.

A dense mask has a number for every pair of query and key, and its shape changes with every token. A packed mask is one
small int32 tensor, `[batch, 1, nodes, 3 + ceil(nodes / 32)]`. Its shape depends only on the size of the tree, and its
four dimensions let transformers pass it on unchanged.

Keys are in columns. Column j of a row has the cached token at position j. The nodes of a step follow the longest row in
slot order, from the column `scratch` on; columns between the end of a row and the scratch are garbage.
`lookahead.core.packed_masks` defines the fields of a mask.

The tensor contains everything that changes from step to step, so a captured CUDA graph needs no other update.

Rows of an engine share one buffer in `Pages`. Their nodes are packed in one row, `[1, 1, nodes, 3 + words]`; positions,
slots and columns are counted for each text, and its scratch begins at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.core.packed_masks import BITS, FIRST, SCRATCH, VISIBLE, WORD, packed_width

END = SCRATCH
"""Field of a mask along paths: end of the visible positions of a query."""


@dataclass(frozen=True)
class Pages:
    """Pages of the keys of many texts in one buffer.

    Attributes:
        table: Pages of each text, `[texts, pages]` int32; page p begins at column `p * size`.
        starts: First node of each text, and the number of all nodes, `[texts + 1]` int32.
        size: Columns of a page.
    """

    table: torch.Tensor
    starts: torch.Tensor
    size: int


@dataclass(frozen=True)
class Sight:
    """Visible tokens of the nodes of some trees, in one kind of layer.

    Attributes:
        slots: Visible slots, the node's own included, `[batch, nodes, nodes]` bool.
        ends: End of the visible cached tokens, `[batch, nodes]`.
        first: First visible position, `[batch, nodes]`; `None` if it is 0 for all.
        longest: Cached tokens of the longest row; nodes follow it.
    """

    slots: NDArray[np.bool_]
    ends: NDArray[np.int64]
    first: NDArray[np.int64] | None
    longest: int

    def packed(self) -> NDArray[np.int32]:
        """Return the packed mask, `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32. No slot may see a later one."""
        batch, nodes = self.ends.shape
        packed = np.zeros((batch, 1, nodes, packed_width(nodes)), dtype=np.int32)
        bits = np.zeros((batch, 1, nodes, (packed.shape[3] - BITS) * WORD), dtype=np.bool_)
        bits[:, 0, :, :nodes] = self.slots
        packed[:, 0, :, VISIBLE] = self.ends
        if self.first is not None:
            packed[:, 0, :, FIRST] = self.first
        packed[..., SCRATCH] = self.longest
        packed[..., BITS:] = np.packbits(bits, axis=3, bitorder="little").view("<i4")
        return packed

    def dense(self, dtype: torch.dtype, dropped: int = 0) -> torch.Tensor:
        """Return the dense mask `[batch, 1, nodes, keys]` without the first `dropped` keys.

        Hidden keys have the lowest number of `dtype`, visible ones 0.
        """
        (batch, nodes), behind = self.ends.shape, self.longest - dropped
        lowest = torch.finfo(dtype).min
        ends = self.ends[:, :, None]
        mask = torch.zeros((batch, 1, nodes, behind + nodes), dtype=dtype)
        mask[:, 0, :, behind:].masked_fill_(torch.from_numpy(~self.slots), lowest)
        if self.first is not None or (ends < self.longest).any():
            column = np.arange(dropped, self.longest)
            hidden = column >= ends
            if self.first is not None:
                hidden |= column < self.first[:, :, None]
            mask[:, 0, :, :behind].masked_fill_(torch.from_numpy(hidden), lowest)
        return mask


def sight(
    ancestors: NDArray[np.bool_],
    lengths: Sequence[int] | NDArray[np.int64],
    positions: NDArray[np.int64],
    window: int | None = None,
    chunk: int | None = None,
) -> Sight:
    """Return the visible tokens of the nodes of a step.

    Args:
        ancestors: Slots visible to each slot without a window, `[batch, nodes, nodes]`. A slot that does not even see
            itself is padding; it gets itself, so that its softmax is not empty.
        lengths: Cached tokens of each row.
        positions: Position ids of the nodes, `[batch, nodes]`.
        window: Window of a sliding layer: tokens at smaller distances are visible.
        chunk: Chunk size of a chunked layer: tokens of the same chunk are visible.
    """
    batch, nodes = positions.shape
    first = None
    slots = ancestors.copy()
    is_real = ancestors.any(axis=2)
    if window is not None or chunk is not None:
        first = is_real * first_position(positions, window, chunk)
        # Positions give the distance of a node and its ancestors.
        slots &= positions[:, None, :] >= first[:, :, None]
    slots.reshape(batch, -1)[:, :: nodes + 1] = True  # the diagonal
    return Sight(slots, is_real * np.asarray(lengths)[:, None], first, int(max(lengths)))


def unpack(packed: torch.Tensor, keys: int) -> torch.Tensor:
    """Convert a packed mask to a dense one: its definition.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device.
        keys: Number of columns, scratch and unused ones included.

    Returns:
        Visible keys of each query, `[batch, 1, nodes, keys]` bool.
    """
    slots = (packed.shape[3] - BITS) * WORD
    column = torch.arange(keys, device=packed.device, dtype=torch.int32).expand(*packed.shape[:3], keys)
    cached = (column >= packed[..., FIRST, None]) & (column < packed[..., VISIBLE, None])
    slot = column - packed[..., SCRATCH, None]
    in_tree = (slot >= 0) & (slot < slots)
    slot = slot.clamp(0, slots - 1)
    word = packed[..., BITS:].gather(-1, (slot // WORD).long())
    return cached | (in_tree & ((word >> (slot % WORD)) & 1).bool())


def along_paths(packed: torch.Tensor) -> torch.Tensor:
    """Replace the bits of a packed mask by the columns of each node's path, without reading from the device.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device. The first node of a row is padding only if all of
            them are.

    Returns:
        `[batch, 1, nodes, 3 + 32 * words]` int32: `VISIBLE`, `FIRST`, `END`, and from `BITS` on the columns of the
        path's nodes by position, the node itself included, then -1. The first position on a path is the end of the
        row's text, or `FIRST` if that is later.
    """
    words = packed.shape[-1] - BITS
    bit, slot = (torch.arange(count, device=packed.device, dtype=torch.int32) for count in (WORD, WORD * words))
    seen = ((packed[..., BITS:, None] >> bit) & 1).flatten(-2).bool()
    # Slots are in the order of positions: parents precede their children.
    path = torch.where(seen, slot, WORD * words).sort(dim=-1).values
    columns = torch.where(path < WORD * words, path + packed[..., SCRATCH, None], -1)
    length = packed[:, :, :1, VISIBLE]
    end = torch.maximum(packed[..., FIRST], length) + seen.sum(dim=-1, dtype=torch.int32)
    return torch.cat([packed[..., :SCRATCH], end[..., None], columns], dim=-1).int()


def first_position(positions: NDArray[np.int64], window: int | None, chunk: int | None) -> NDArray[np.int64]:
    """Return the first visible position for each of `positions`; `window` and `chunk` as for `sight`."""
    if window is not None:
        return np.maximum(positions - window + 1, 0)
    if chunk is not None:
        return positions // chunk * chunk
    return np.zeros_like(positions)
