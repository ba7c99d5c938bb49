"""Packed masks: the tokens that each node of a token tree may see, in a few numbers of int32.

Each query has a row `[3 + ceil(nodes / 32)]`:

| column | content |
| --- | --- |
| `VISIBLE` | cached tokens it may see: those at positions below this number |
| `FIRST` | the first position it may see; more than 0 in layers that see part of the text |
| `SCRATCH` | the column where the nodes of this step begin |
| `BITS` and on | the slots it may see, one bit each: bit `slot % 32` of word `slot // 32` |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled

VISIBLE = 0
FIRST = 1
SCRATCH = 2
BITS = 3
WORD = 32
"""Slots in one word of a bit set."""


def packed_width(nodes: int) -> int:
    """Size of the last dimension of the packed mask of `nodes` nodes."""
    return BITS + -(-nodes // WORD)


@compiled
def write_masks(
    firsts: NDArray[np.int64],
    parent_slots: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    window: int,
    chunk: int,
    mask: NDArray[np.int32],
) -> None:
    """Write the packed masks of trees that lie one behind another, for one kind of layer; see the module.

    Args:
        firsts: Nodes before each tree, and behind them their sum, `[rows + 1]`.
        parent_slots: Slot of the parent of the node in each slot, within its tree, `[nodes]`.
        lengths: Cached tokens of each row, `[rows]`.
        places: Index in its text of the node in each slot, `[nodes]`.
        window: Tokens that a sliding layer sees; 0 for other layers.
        chunk: Tokens of a chunk; 0 for other layers.
        mask: Gets the masks, `[nodes or more, 3 + words]`.
    """
    limited = window > 0 or chunk > 0
    for row in range(len(firsts) - 1):
        begin = firsts[row]
        for slot in range(firsts[row + 1] - begin):
            seen = mask[begin + slot]
            first = 0
            above = parent_slots[begin + slot]
            if window > 0:
                first = max(places[begin + slot] - window + 1, 0)
            elif chunk > 0:
                first = places[begin + slot] // chunk * chunk
            seen[VISIBLE], seen[FIRST], seen[SCRATCH] = lengths[row], first, lengths[row]
            for word in range(BITS, len(seen)):
                seen[word] = 0 if limited or above < 0 else mask[begin + above, word]
            seen[BITS + slot // WORD] |= np.int32(1) << np.int32(slot % WORD)
            while limited and above >= 0 and places[begin + above] >= first:
                seen[BITS + above // WORD] |= np.int32(1) << np.int32(above % WORD)
                above = parent_slots[begin + above]
