"""Inputs of a pass over texts in pages of one memory: tokens, positions and columns of all nodes, and page tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import typed
from lookahead.core.forest import Integers

Buffers = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Outputs: tokens, positions and columns, `[nodes]`; first node of each text, `[texts + 2]`; `[texts + 1, pages]`."""


@typed
def write_inputs(
    begin: int,
    trees: tuple[Integers, Integers, Integers, Integers],
    texts: tuple[Integers, Integers],
    pages: tuple[NDArray[np.int32], int, bool],
    buffers: Buffers,
) -> int:
    """Write the inputs of a pass, or of a part of it; return the number of its nodes without padding.

    Padding nodes are token 0 at position 0, in page 0.

    Args:
        begin: Slot of the first node of the part.
        trees: `firsts`, `rows_of_slots` and `slot_tokens` of a `Forest`, and the position id in each slot, `[nodes]`.
        texts: Number in the memory and cached tokens of each text, `[rows]`.
        pages: Pages of each text in the memory, `[texts, pages]`, their size in tokens, and whether the only text is
            in consecutive pages from page 1 on.
        buffers: Outputs.
    """
    firsts, rows_of_slots, tokens, positions = trees
    numbers, lengths = texts
    page_table, block, is_slice = pages
    tokens_here, positions_here, columns, starts, table = buffers
    nodes = len(tokens_here)
    used = min(nodes, len(tokens) - begin)
    for node in range(used):
        slot = begin + node
        row = rows_of_slots[slot]
        place = lengths[row] + slot - firsts[row]
        tokens_here[node], positions_here[node] = tokens[slot], positions[slot]
        number = 1 + place // block if is_slice else page_table[numbers[row], place // block]
        columns[node] = number * block + place % block
    for node in range(used, nodes):
        tokens_here[node] = positions_here[node] = 0
        columns[node] = (node - used) % block
    if not is_slice:
        starts[:] = used
        starts[len(starts) - 1] = nodes
        width = min(table.shape[1], page_table.shape[1])
        for row in range(len(numbers)):
            starts[row] = min(max(firsts[row] - begin, 0), used)
            for page in range(width):
                table[row, page] = page_table[numbers[row], page]
    return used
