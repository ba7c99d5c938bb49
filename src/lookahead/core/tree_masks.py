"""Masks of token trees: the cached tokens and the nodes that each node may see.

A dense mask has a number for each pair of node and key, 0 where it is visible. A packed mask has a few numbers of int32
for each node, `[3 + ceil(nodes / 32)]`:

| column | content |
| --- | --- |
| `VISIBLE` | cached tokens it may see: those at positions below this number |
| `FIRST` | the first position it may see; more than 0 in layers that see part of the text |
| `SCRATCH` | the column where the nodes of this step begin |
| `BITS` and on | the slots it may see, one bit each: bit `slot % 32` of word `slot // 32` |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, at_once, compiled

Integers = NDArray[np.int64]

VISIBLE, FIRST, SCRATCH, BITS = range(4)
WORD = np.iinfo(np.int32).bits
"""Slots in one word of a bit set."""

_LOWEST = float(np.finfo(np.float32).min)


def packed_width(nodes: int) -> int:
    """Size of the last dimension of the packed mask of `nodes` nodes."""
    return BITS + -(-nodes // WORD)


class MaskedTrees(NamedTuple):
    """Trees of a pass, one behind another.

    Attributes:
        firsts: Number of nodes before each tree, and at the end of all, `[rows + 1]`.
        parent_slots: Slot of the parent of the node in each slot, within its tree, `[nodes]`; -1 for the first pending
            token, -2 for padding, which sees only itself.
        lengths: Cached tokens of each row, `[rows]`.
        places: Index in its text of the node in each slot, `[nodes]`.
    """

    firsts: Integers
    parent_slots: Integers
    lengths: Integers
    places: Integers


def packed_masks(trees: MaskedTrees, window: int | None, chunk: int | None, width: int) -> NDArray[np.int32]:
    """Return the packed masks of trees for one kind of layer, `[nodes, width]`.

    Args:
        trees: The trees.
        window: Tokens that a sliding layer sees; `None` for other layers.
        chunk: Tokens of a chunk; `None` for other layers.
        width: At least `packed_width` of the largest tree.
    """
    mask = np.empty((len(trees.places), width), dtype=np.int32)
    at_once(write_masks)(trees, window or 0, chunk or 0, mask)
    return mask


def dense_masks(
    trees: MaskedTrees, scratch: Integers, reach: tuple[int | None, int | None], hidden: float, dropped: int = 0
) -> tuple[NDArray[np.floating], Integers]:
    """Return the dense masks of trees for one kind of layer.

    Args:
        trees: The trees.
        scratch: Key of the first node of each row, `[rows]`, before others are dropped.
        reach: Window and chunk; see `packed_masks`.
        hidden: Number for hidden keys; visible ones get 0.
        dropped: Number of first keys that the layer has dropped.

    Returns:
        Masks `[nodes, keys]` of all rows, one behind another, and the index of each in them, `[rows]`. The keys of a
        row end with its last node.
    """
    counts = trees.firsts[1:] - trees.firsts[:-1]
    exact = np.float32 if hidden >= _LOWEST else np.float64
    masks = np.empty(counts @ (scratch - dropped + counts), dtype=exact)
    begins = np.empty(len(counts), dtype=np.int64)
    window, chunk = reach
    _WRITE_DENSE[exact](trees, scratch, (window or 0, chunk or 0, dropped), hidden, masks, begins)
    return masks, begins


@compiled
def write_masks(trees: MaskedTrees, window: int, chunk: int, mask: NDArray[np.int32]) -> None:
    """Write the packed masks of trees for one kind of layer.

    Args:
        trees: The trees.
        window: Tokens that a sliding layer sees; 0 for other layers.
        chunk: Tokens of a chunk; 0 for other layers.
        mask: Gets the masks, `[nodes or more, 3 + words]`.
    """
    firsts, parent_slots, lengths, places = trees
    limited = window > 0 or chunk > 0
    for row in range(len(firsts) - 1):
        begin = firsts[row]
        is_path = True
        for slot in range(firsts[row + 1] - begin):
            seen = mask[begin + slot]
            first = 0
            above = parent_slots[begin + slot]
            is_path = is_path and above == slot - 1
            if window > 0:
                first = max(places[begin + slot] - window + 1, 0)
            elif chunk > 0:
                first = places[begin + slot] // chunk * chunk
            seen[VISIBLE] = lengths[row] if above >= -1 else 0
            seen[FIRST], seen[SCRATCH] = first, lengths[row]
            for word in range(BITS, len(seen)):
                seen[word] = mask[begin + above, word] if above >= 0 and (is_path or not limited) else 0
            seen[BITS + slot // WORD] |= np.int32(1) << np.int32(slot % WORD)
            if is_path:
                start = max(slot - places[begin + slot] + first, 0)
                seen[BITS : BITS + start // WORD] = 0
                seen[BITS + start // WORD] &= np.int32(-1) << np.int32(start % WORD)
            while limited and not is_path and above >= 0 and places[begin + above] >= first:
                seen[BITS + above // WORD] |= np.int32(1) << np.int32(above % WORD)
                above = parent_slots[begin + above]


@compiled
def write_dense_masks(
    trees: MaskedTrees,
    scratch: Integers,
    reach: tuple[int, int, int],
    hidden: float,
    masks: NDArray[np.floating],
    begins: Integers,
) -> None:
    """Write the dense masks of trees.

    Args:
        trees, scratch, hidden: See `dense_masks`.
        reach: Window and chunk, 0 for none, and the number of dropped keys.
        masks, begins: Outputs; see `dense_masks`.
    """
    firsts, parent_slots, lengths, places = trees
    window, chunk, dropped = reach
    masks[:] = hidden
    end = 0
    limited = window > 0 or chunk > 0
    for row in range(len(firsts) - 1):
        begin = firsts[row]
        count = firsts[row + 1] - begin
        keys = scratch[row] - dropped + count
        begins[row] = end
        end += count * keys
        is_path = True
        for slot in range(count):
            at = begins[row] + slot * keys
            nodes = at + keys - count
            masks[nodes + slot] = 0
            above = parent_slots[begin + slot]
            if above < -1:
                continue
            is_path = is_path and above == slot - 1
            first = 0
            if window > 0:
                first = max(places[begin + slot] - window + 1, 0)
            elif chunk > 0:
                first = places[begin + slot] // chunk * chunk
            start = max(first - dropped, 0)
            if lengths[row] - dropped > start:
                masks[at + start : at + lengths[row] - dropped] = 0
            if is_path:
                masks[nodes + max(slot - places[begin + slot] + first, 0) : nodes + slot] = 0
            elif limited:
                while above >= 0 and places[begin + above] >= first:
                    masks[nodes + above] = 0
                    above = parent_slots[begin + above]
            else:
                parent = begins[row] + above * keys + keys - count
                for other in range(above + 1):  # ancestors of its parent lie before that
                    masks[nodes + other] = masks[parent + other]


_WRITE_DENSE = {kind: TypedLoop(write_dense_masks, runs_plain=True) for kind in (np.float32, np.float64)}
"""The loop for each type of numbers of the masks."""
