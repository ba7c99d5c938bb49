"""Attention over trees, without a dense mask: a packed mask has the visible tokens of each node in a few numbers.

A dense mask has a number for every pair of query and key, and its shape changes with every token. A packed mask is one
small int32 tensor, `[batch, 1, nodes, 3 + ceil(nodes / 32)]`. Its shape depends only on the size of the tree, and its
four dimensions let transformers pass it on unchanged.

Keys are in columns. Column j of a row has the cached token at position j. The nodes of a step follow the longest row in
slot order, from the column `scratch` on; columns between the end of a row and the scratch are garbage.
`lookahead.core.tree_masks` defines the fields of a mask.

The tensor contains everything that changes from step to step, so a captured CUDA graph needs no other update.

Rows of an engine share one buffer in `Pages`. Their nodes are packed in one row, `[1, 1, nodes, 3 + words]`; positions,
slots and columns are counted for each text, and its scratch begins at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.core.tree_masks import BITS, FIRST, SCRATCH, VISIBLE, WORD

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

    def indices(self, nodes: int, keys: int) -> torch.Tensor:
        """Return the index in the text of each node of the key in each column, `[nodes, keys]` int64.

        It is the capacity of a text for keys of other texts.
        """
        texts, width = self.table.shape
        index = torch.arange(width * self.size, device=self.table.device)
        columns = self.table[:, index // self.size] * self.size + index % self.size
        owned = torch.full((texts, keys), len(index), device=index.device)
        # A text's old pages follow its own in the table, so the smallest index is right.
        owned = owned.scatter_reduce(1, columns.long(), index.expand(texts, -1), "amin")
        node = torch.arange(nodes, device=index.device)
        return owned[(node[:, None] >= self.starts[None, 1:]).sum(dim=1)]


def unpack(packed: torch.Tensor, keys: int, pages: Pages | None = None) -> torch.Tensor:
    """Convert a packed mask to a dense one: its definition.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device.
        keys: Number of columns, scratch and unused ones included.
        pages: Pages of the keys of each text, for several texts with a batch of 1.

    Returns:
        Visible keys of each query, `[batch, 1, nodes, keys]` bool.
    """
    slots = (packed.shape[3] - BITS) * WORD
    if pages is None:
        column = torch.arange(keys, device=packed.device, dtype=torch.int32).expand(*packed.shape[:3], keys)
    else:
        column = pages.indices(packed.shape[2], keys)[None, None]
    cached = (column >= packed[..., FIRST, None]) & (column < packed[..., VISIBLE, None])
    slot = column - packed[..., SCRATCH, None]
    in_tree = (slot >= 0) & (slot < slots)
    slot = slot.clamp(0, slots - 1)
    word = packed[..., BITS:].gather(-1, (slot // WORD).long())
    return cached | (in_tree & ((word >> (slot % WORD)) & 1).bool())


def along_paths(packed: torch.Tensor, has_pages: bool = False) -> torch.Tensor:
    """Replace the bits of a packed mask by the columns of each node's path, without reading from the device.

    Args:
        packed: `[batch, 1, nodes, 3 + words]` int32, on any device. The first node of a row is padding only if all of
            them are.
        has_pages: Whether a row has the nodes of several texts.

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
    length = packed[..., VISIBLE] if has_pages else packed[:, :, :1, VISIBLE]
    end = torch.maximum(packed[..., FIRST], length) + seen.sum(dim=-1, dtype=torch.int32)
    return torch.cat([packed[..., :SCRATCH], end[..., None], columns], dim=-1).int()


def first_position(positions: NDArray[np.int64], window: int | None, chunk: int | None) -> NDArray[np.int64]:
    """Return the first visible position for each of `positions`; `window` and `chunk` as for `packed_masks`."""
    if window is not None:
        return np.maximum(positions - window + 1, 0)
    if chunk is not None:
        return positions // chunk * chunk
    return np.zeros_like(positions)
