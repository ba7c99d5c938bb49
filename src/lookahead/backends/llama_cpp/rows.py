"""Texts in a llama.cpp context: the sequence ids that hold them, and the leaves of their trees."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.backends.base import TextRow
from lookahead.backends.llama_cpp.context import LlamaContext
from lookahead.core.forest import Layout, lay_out
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

ID_BYTES = np.dtype(np.int32).itemsize


class Branches(NamedTuple):
    """Leaves below each node of a tree. Nodes are laid out depth first, so these leaves are consecutive.

    Attributes:
        layout: The slot of each node.
        first: First leaf below the node in each slot, `[nodes]`; a leaf is below itself. Leaves are numbered in the
            order of their paths, the likeliest first.
        last: Last leaf below the node in each slot, `[nodes]`.
        leaves: Number of leaves.
    """

    layout: Layout
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    leaves: int


def branches(tree: TokenTree, layout: Layout | None = None) -> Branches:
    """Find the leaves of `tree`; pass its `layout` if it is known."""
    layout = lay_out(tree) if layout is None else layout
    if tree.is_chain:
        only = np.zeros(len(tree), dtype=np.int64)
        return Branches(layout, only, only, 1)
    is_leaf = np.ones(len(tree), dtype=np.int64)
    is_leaf[layout.parent_slots[1:]] = 0
    first = is_leaf.cumsum() - is_leaf
    below = is_leaf.tolist()
    parents = layout.parent_slots.tolist()
    for slot in range(len(tree) - 1, 0, -1):  # a node comes after its parent
        below[parents[slot]] += below[slot]
    return Branches(layout, first, first + np.array(below) - 1, below[0])


class LlamaRow(TextRow):
    """One text, and the sequence ids that hold it. All of them hold the same tokens.

    The row keeps its first id; trees with several leaves take more. It has none before its first token, and after
    `set_apart`.

    Args:
        pool: Allocator of the ids. They return to it when the row is garbage-collected.

    Attributes:
        ids: The sequence ids, always in the same list object.
        address: Address of the ids as int32, valid until they change.
    """

    def __init__(self, pool: SequenceIds) -> None:
        self._pool = pool
        self.ids: list[int] = []
        self.set_ids([])
        self.length = 0
        self._apart: NDArray[np.uint8] | None = None
        weakref.finalize(self, pool.returned.append, self.ids)

    def copy_start(self, other: LlamaRow, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, and share its cells.

        If `other` was set apart, the tokens are loaded into new cells. Without enough cells, this row stays empty.
        """
        self._pool.give([self], [1])
        context = self._pool.context
        sequence = self.ids[0]
        if other._apart is None:
            context.copy(other.ids[0], sequence, 0, tokens)
        elif context.load(other._apart, sequence):
            context.remove(sequence, tokens)
        else:
            return
        self.length = tokens

    def set_apart(self) -> None:
        """Move keys and values out of the context, where they would slow down the attention of all rows.

        Afterwards the row can only serve `copy_start` of other rows.
        """
        self._apart = self._pool.context.save(self.ids[0])
        self._pool.take_back(self)

    def crop(self, tokens: int) -> None:
        """Remove all tokens after the first `tokens`."""
        for sequence in self.ids:
            self._pool.context.remove(sequence, tokens)
        self.length = tokens

    def set_ids(self, ids: Sequence[int]) -> None:
        """Replace the sequence ids of the row."""
        self.ids[:] = ids
        self._memory = np.array(ids, dtype=np.int32)
        self.address = self._memory.ctypes.data


class SequenceIds:
    """Allocator of the sequence ids of a context.

    Attributes:
        context: The context; empty at first.
        returned: Ids of deleted rows, with cells to free: a row may be garbage-collected in any thread, at any time.
    """

    def __init__(self, context: LlamaContext) -> None:
        self.context = context
        self.returned: deque[list[int]] = deque()
        self._spare = list(range(context.sequences))
        self._holders: weakref.WeakSet[LlamaRow] = weakref.WeakSet()

    def give(self, rows: Sequence[LlamaRow], counts: Sequence[int]) -> None:
        """Give each row at least `counts` ids, and let all of them hold its text.

        Raises:
            InvalidArgumentError: There are not enough ids.
        """
        while self.returned:
            self._free(self.returned.popleft())
        for row, count in zip(rows, counts, strict=True):
            missing = count - len(row.ids)
            if missing <= 0:
                continue
            if len(self._spare) < missing:
                self._reclaim(missing, dict(zip(rows, counts, strict=True)))
            taken = self._spare[:missing]
            self._spare = self._spare[missing:]
            if row.length:
                for sequence in taken:
                    self.context.copy(row.ids[0], sequence)
            row.set_ids([*row.ids, *taken])
            self._holders.add(row)

    def take_back(self, row: LlamaRow, left: int = 0) -> None:
        """Take back all ids of a row but the first `left`, and free their cells."""
        if len(row.ids) > left:
            self._free(row.ids[left:])
            row.set_ids(row.ids[:left])

    def _reclaim(self, missing: int, counts: dict[LlamaRow, int]) -> None:
        """Take back ids that rows do not need (`counts`, at least 1 each) until `missing` are spare."""
        needed = {row: max(counts.get(row, 1), 1) for row in list(self._holders)}
        for row in sorted(needed, key=lambda row: needed[row] - len(row.ids)):
            if len(self._spare) < missing:
                self.take_back(row, needed[row])
        if len(self._spare) < missing:
            raise InvalidArgumentError(
                f"the trees of a step have {sum(counts.values())} leaves, but llama.cpp has {self.context.sequences} "
                "sequences; choose a smaller step_budget, or fewer rows"
            )

    def _free(self, ids: Sequence[int]) -> None:
        for sequence in ids:
            self.context.remove(sequence)
            self._spare.append(sequence)
