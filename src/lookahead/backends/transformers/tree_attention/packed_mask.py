"""What each node of a token tree may see, packed into a few numbers.

A dense mask holds a number for every pair of query and key, and its shape changes with every token. A packed mask is
one small int32 tensor, `[batch, 1, nodes, 3 + ceil(nodes / 32)]`, whose shape depends on the size of the tree alone.
It has four dimensions because transformers hands a mask of four dimensions to the attention function as it is.

The keys it speaks of lie in columns: column j of a row holds the cached token at position j, as far as the row's text
goes; the nodes of this step lie, in slot order, behind the longest row, from the column `scratch` on. What lies between
the end of a row and the scratch is garbage. `lookahead.core.packed_masks` says what the columns of a mask hold.

Everything that changes from step to step is in this tensor, so a captured CUDA graph needs nothing else to be copied
up to date.

Texts that come and go share one buffer, in `Pages`. Their nodes lie one behind another in one row,
`[1, 1, nodes, 3 + words]`; each text counts its positions, slots and columns for itself, and its scratch begins at its
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.core.packed_masks import BITS, FIRST, SCRATCH, VISIBLE, WORD, packed_width

END = SCRATCH
"""In a mask along paths, the column for the position where what a query sees ends."""


@dataclass(frozen=True)
class Pages:
    """Where the keys of many texts lie in one buffer.

    Attributes:
        table: The pages of each text, `[texts, pages]` int32; number p is that of the columns from `p * size` on.
        starts: The first node of each text, and behind them their number, `[texts + 1]` int32.
        size: Columns of a page.
    """

    table: torch.Tensor
    starts: torch.Tensor
    size: int


@dataclass(frozen=True)
class Sight:
    """What each node of some trees may see, in one kind of layer.

    Attributes:
        slots: Which slots, itself included, `[batch, nodes, nodes]` bool.
        ends: How many of the cached tokens, `[batch, nodes]`.
        first: The first position, `[batch, nodes]`; `None` if it is 0 for all.
        longest: Cached tokens of the longest row, behind which the nodes lie.
    """

    slots: NDArray[np.bool_]
    ends: NDArray[np.int64]
    first: NDArray[np.int64] | None
    longest: int

    def packed(self) -> NDArray[np.int32]:
        """The packed mask, `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32. No slot may see a later one: the kernel
        does not look at these."""
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
        """What is added to the scores of all keys but the first `dropped` ones, `[batch, 1, nodes, keys]`: the lowest
        number of `dtype` for those that are hidden, 0 for the others."""
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
    """What the nodes of one step see.

    Args:
        ancestors: Which slots each slot may attend to if its layer sees all the text, `[batch, nodes, nodes]`. A slot
            that sees nothing, not even itself, is padding: it will see itself alone, so that its softmax is not empty.
        lengths: Cached tokens of each row.
        positions: Position ids of the nodes, `[batch, nodes]`.
        window: Of a sliding layer: it sees a token whose distance is less than this.
        chunk: Of a chunked layer: it sees a token of the same chunk of this many positions.
    """
    batch, nodes = positions.shape
    first = None
    slots = ancestors.copy()
    is_real = ancestors.any(axis=2)
    if window is not None or chunk is not None:
        first = is_real * first_position(positions, window, chunk)
        # A node and its ancestors are as far apart as their positions say.
        slots &= positions[:, None, :] >= first[:, :, None]
    slots.reshape(batch, -1)[:, :: nodes + 1] = True  # the diagonal
    return Sight(slots, is_real * np.asarray(lengths)[:, None], first, int(max(lengths)))


def unpack(packed: torch.Tensor, keys: int) -> torch.Tensor:
    """The dense mask that equals a packed one: its definition.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device.
        keys: Columns of keys, the scratch included; more than are in use, if they lie in a buffer.

    Returns:
        Which keys each query may see, `[batch, 1, nodes, keys]` bool.
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
    """A packed mask with the path of each node in place of its bits: in which columns the nodes lie that it sees.

    Nothing is read back from the device.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device. The first node of each row is padding only if all
            of them are.

    Returns:
        `[batch, 1, nodes, 3 + 32 * words]` int32: `VISIBLE`, `FIRST`, `END`, and from `BITS` on the columns of the
        nodes on the path of each node, itself included, in the order of their positions; -1 behind them. The first
        of these positions is the end of the row's text, or `FIRST` if that is later.
    """
    words = packed.shape[-1] - BITS
    bit, slot = (torch.arange(count, device=packed.device, dtype=torch.int32) for count in (WORD, WORD * words))
    seen = ((packed[..., BITS:, None] >> bit) & 1).flatten(-2).bool()
    # Parents lie before their children, so that the order of slots is that of positions.
    path = torch.where(seen, slot, WORD * words).sort(dim=-1).values
    columns = torch.where(path < WORD * words, path + packed[..., SCRATCH, None], -1)
    length = packed[:, :, :1, VISIBLE]
    end = torch.maximum(packed[..., FIRST], length) + seen.sum(dim=-1, dtype=torch.int32)
    return torch.cat([packed[..., :SCRATCH], end[..., None], columns], dim=-1).int()


def first_position(positions: NDArray[np.int64], window: int | None, chunk: int | None) -> NDArray[np.int64]:
    """The first position that is seen from each of `positions`, in a layer as in `pack`."""
    if window is not None:
        return np.maximum(positions - window + 1, 0)
    if chunk is not None:
        return positions // chunk * chunk
    return np.zeros_like(positions)
