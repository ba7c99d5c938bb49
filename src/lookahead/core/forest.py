"""The trees of a step as arrays: all nodes of all rows one behind another, and the order of sending them.

A tree numbers its nodes in the order of adding them (`TokenTree`). A pass reads them in *slots*: pending
tokens first, then the others depth first, each node followed by the child that was added first, the candidates below
the root before its window. Drafters add the likeliest path first, so the accepted path most often lies directly behind
the root, where its keys and values need not be moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, typed
from lookahead.core.token_tree import NodeKind, TokenTree

Integers = NDArray[np.int64]


class Layout(NamedTuple):
    """Order of sending the nodes of one tree.

    Attributes:
        order: Node in each slot, `[nodes]`.
        slots: Slot of each node, `[nodes]`, the inverse of `order`.
        tokens: Token id in each slot, `[nodes]` int64.
        depths: Depth of the node in each slot, `[nodes]` int64.
        read_slots: Slots with a prediction to read, ascending.
        parent_slots: Slot of the parent of the node in each slot, `[nodes]`; -1 for the first pending token.
        pending: Number of pending tokens.
    """

    order: Integers
    slots: Integers
    tokens: Integers
    depths: Integers
    read_slots: Integers
    parent_slots: Integers
    pending: int

    @property
    def is_chain(self) -> bool:
        """See `TokenTree.is_chain`."""
        return len(self.order) == self.pending

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """Slots that each slot may attend to: its ancestors and itself, `[nodes, nodes]` bool."""
        mask = np.eye(len(self.order), dtype=np.bool_)
        for slot, parent in enumerate(self.parent_slots.tolist()):
            if parent >= 0:
                mask[slot, : parent + 1] = mask[parent, : parent + 1]
        return mask


class Forest(Sequence[TokenTree]):
    """The trees of a step, one for each row. As a sequence, it makes a `TokenTree` where there are only arrays.

    Args:
        trees: The trees. They must not change any more.

    Attributes:
        rows: Number of trees.
        objects: The trees that are objects already; `None` for others, which have one pending token.
        counts: Nodes of each tree, `[rows]`.
        firsts: Nodes of all trees before each, and behind them their sum, `[rows + 1]`.
        roots: The root of each tree, a node of that tree, `[rows]`.
        tokens: Token id of each node, `[nodes]`; in the order of nodes, like all that follows up to `order`.
        parents: Parent of each node, a node of its tree; -1 for the first pending token.
        reads: Whether the prediction after each node is wanted, `[nodes]` bool.
        in_window: Whether each node is a window node, `[nodes]` bool.
        depths: Distance of each node from the cached text.
        slots: Slot of each node within its tree.
        order: Index in these arrays of the node in each slot of all trees, one tree behind another.
        parent_slots: Slot of the parent of the node in each slot, within its tree; -1 for the first pending token.
        slot_tokens, slot_depths: Token id and depth of the node in each slot.
        rows_of_slots: The row of each node, and of each slot.
        read_slots: Slots with a prediction to read, counted through all trees, ascending.
        read_nodes: The index of the node in each of them.
        is_plain: Whether nothing was drafted for any row.
        has_certain: Whether a tree has nodes added by `TokenTree.add_certain`.
    """

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.objects: list[TokenTree | None] = list(trees)
        self.rows = len(trees)
        self.has_certain = has_window = False
        counts: list[int] = []
        roots: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        reads: list[bool] = []
        for tree in trees:
            counts.append(len(tree.tokens))
            roots.append(tree.root)
            tokens += tree.tokens
            parents += tree.parents
            reads += tree.needs_logits
            self.has_certain |= tree.certain > 0
            has_window |= tree.has_window
        if len(tokens) == 1:
            self._set_plain(tokens, reads[0])
            return
        self.counts = np.array(counts, dtype=np.int64)
        self.roots = np.array(roots, dtype=np.int64)
        self.is_plain = bool((self.counts == self.roots + 1).all())
        self.firsts = _firsts(self.counts)
        self.tokens = np.array(tokens, dtype=np.int64)
        self.reads = np.array(reads, dtype=np.bool_)
        self.in_window = np.zeros(len(tokens), dtype=np.bool_)
        if self.is_plain:
            self._lay_out_plain()
        else:
            self.parents = np.array(parents, dtype=np.int64)
            if has_window:
                kinds = chain.from_iterable(tree.kinds for tree in trees)
                self.in_window[:] = [kind is NodeKind.WINDOW for kind in kinds]
            self._lay_out()

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> Forest:
        """A forest of one token in each row, which is read."""
        forest = cls.__new__(cls)
        forest.objects = [None] * len(tokens)
        forest.rows = len(tokens)
        forest.has_certain = False
        forest._set_plain(tokens, True)
        return forest

    @classmethod
    def of_rows(
        cls,
        trees: Sequence[TokenTree | None],
        last: Sequence[int],
        drafts: tuple[Integers, Integers, Integers, Integers],
    ) -> Forest:
        """The forest of trees that are objects already, and of rows with one pending token and candidates below it.

        Args:
            trees: The trees; `None` for the other rows.
            last: The pending token of each of these, which is read; any token for trees, `[rows]`.
            drafts: Rows with candidates, their numbers, tokens and parents; see `Roots.add`.
        """
        forest = cls.__new__(cls)
        forest.objects = list(trees)
        forest.rows = len(trees)
        sizes = [1 if tree is None else len(tree.tokens) for tree in trees]
        size = sum(sizes) + len(drafts[2])
        forest.counts, forest.roots = np.array([sizes, [0] * len(sizes)], dtype=np.int64)
        forest.firsts = np.empty(len(sizes) + 1, dtype=np.int64)
        forest.tokens, forest.parents = np.empty((2, size), dtype=np.int64)
        forest.reads = np.ones(size, dtype=np.bool_)
        forest.in_window = np.zeros(size, dtype=np.bool_)
        arrays = forest.counts, forest.firsts, forest.tokens, forest.parents
        _write_drafts(np.array(last, dtype=np.int64), drafts, arrays)
        forest.is_plain = forest.has_certain = False
        if any(trees):
            forest._write_objects()
            forest.is_plain = size == int(forest.roots.sum()) + len(sizes)
        if forest.is_plain:
            forest._lay_out_plain()
        else:
            forest._lay_out()
        return forest

    def _write_objects(self) -> None:
        """Write the trees that are objects to the arrays."""
        for row, tree in enumerate(self.objects):
            if tree is not None:
                begin = self.firsts[row]
                end = begin + len(tree)
                self.tokens[begin:end], self.parents[begin:end] = tree.tokens, tree.parents
                self.reads[begin:end], self.roots[row] = tree.needs_logits, tree.root
                self.has_certain |= tree.certain > 0
                if tree.has_window:
                    self.in_window[begin:end] = [kind is NodeKind.WINDOW for kind in tree.kinds]

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """The trees as a forest, which they may be already."""
        return trees if isinstance(trees, cls) else cls(trees)

    @overload
    def __getitem__(self, row: int) -> TokenTree: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[TokenTree]: ...

    def __getitem__(self, row: int | slice) -> TokenTree | Sequence[TokenTree]:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(self.rows))]
        tree = self.objects[row]
        if tree is None:
            self.objects[row] = tree = self._tree(row % self.rows)
        return tree

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[TokenTree]:
        return (self[row] for row in range(self.rows))

    def _tree(self, row: int) -> TokenTree:
        """The tree of a row, made from the arrays: candidates below one pending token."""
        begin = self.firsts[row]
        end = self.firsts[row + 1]
        tokens = self.tokens[begin:end].tolist()
        parents = [-1] if self.is_plain else self.parents[begin:end].tolist()
        tree = TokenTree(tokens[:1])
        tree.add_new_candidates(tokens[1:], parents[1:])
        return tree

    def _set_plain(self, tokens: Sequence[int], reads: bool) -> None:
        """Set the arrays of one token in each row."""
        vars(self).update(_tokens_alone(len(tokens), reads))
        self.tokens = self.slot_tokens = np.array(tokens, dtype=np.int64)

    def _lay_out_plain(self) -> None:
        """Chains of pending tokens, sent in their order."""
        self.order = np.arange(len(self.tokens))
        self.rows_of_slots = np.repeat(self.order[: self.rows], self.counts)
        self.depths = self.slots = self.slot_depths = self.order - self.firsts[self.rows_of_slots]
        self.parents = self.parent_slots = self.depths - 1
        self.slot_tokens = self.tokens
        self.read_slots = self.read_nodes = np.flatnonzero(self.reads)

    def _lay_out(self) -> None:
        """Order the nodes depth first."""
        trees = self.firsts, self.roots, self.tokens, self.parents, self.reads, self.in_window
        slots = np.empty((9, len(self.tokens)), dtype=np.int64)
        read = _write_order(*trees, slots)
        self.order, self.slots, self.parent_slots, self.depths, self.slot_tokens, self.slot_depths = slots[:6]
        self.rows_of_slots = slots[6]
        self.read_slots, self.read_nodes = slots[7:, :read]

    def take(self, rows: Sequence[int]) -> Forest:
        """The trees of some rows."""
        return self if len(rows) == self.rows else Forest([self[row] for row in rows])

    def layout(self, row: int) -> Layout:
        """Order of sending the nodes of one tree."""
        begin = self.firsts[row]
        end = self.firsts[row + 1]
        nodes = self.order[begin:end]
        return Layout(
            nodes - begin,
            self.slots[begin:end],
            self.tokens[nodes],
            self.depths[nodes],
            np.flatnonzero(self.reads[nodes]),
            self.parent_slots[begin:end],
            int(self.roots[row]) + 1,
        )


@lru_cache(maxsize=512)
def _tokens_alone(rows: int, reads: bool) -> dict[str, Any]:
    """Attributes of a forest of one token in each row, except `tokens`; kept, because plain steps are short."""
    numbers = np.arange(rows)
    zeros = np.zeros(rows, dtype=np.int64)
    before = zeros - 1
    read = numbers if reads else numbers[:0]
    return {
        **dict.fromkeys(("order", "rows_of_slots"), numbers),
        **dict.fromkeys(("roots", "depths", "slots", "slot_depths"), zeros),
        **dict.fromkeys(("parents", "parent_slots"), before),
        **dict.fromkeys(("read_slots", "read_nodes"), read),
        "counts": np.ones(rows, dtype=np.int64),
        "firsts": np.arange(rows + 1),
        "reads": np.full(rows, reads),
        "in_window": np.zeros(rows, dtype=np.bool_),
        "is_plain": True,
    }


def lay_out(tree: TokenTree) -> Layout:
    """Order of sending the nodes of `tree`."""
    return Forest([tree]).layout(0)


def _firsts(counts: Integers) -> Integers:
    """The sum of all counts before each, and behind them of all."""
    firsts = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=firsts[1:])
    return firsts


@typed
def _write_drafts(
    last: Integers,
    drafts: tuple[Integers, Integers, Integers, Integers],
    trees: tuple[Integers, Integers, Integers, Integers],
) -> None:
    """Add drafts to `counts` of a `Forest`, and write its `firsts`, `tokens` and `parents`; see `Forest.of_rows`."""
    rows, drafted, candidates, above = drafts
    counts, firsts, tokens, parents = trees
    for index in range(len(rows)):
        counts[rows[index]] += drafted[index]
    firsts[0] = 0
    for row in range(len(last)):
        firsts[row + 1] = firsts[row] + counts[row]
        tokens[firsts[row]], parents[firsts[row]] = last[row], -1
    begin = FIRST
    for index in range(len(rows)):
        first = firsts[rows[index]] + 1
        for node in range(drafted[index]):
            tokens[first + node], parents[first + node] = candidates[begin + node], above[begin + node]
        begin += drafted[index]


@typed
def _write_order(
    firsts: Integers,
    roots: Integers,
    tokens: Integers,
    parents: Integers,
    reads: NDArray[np.bool_],
    in_window: NDArray[np.bool_],
    outputs: Integers,
) -> int:
    """Write `order`, `slots`, `parent_slots`, `depths`, `slot_tokens`, `slot_depths`, `rows_of_slots`, `read_slots` and
    `read_nodes` of a `Forest`, and return the number of nodes that are read."""
    order = outputs[0]
    slots = outputs[1]
    parent_slots = outputs[2]
    depths = outputs[3]
    child = outputs[4]  # first child of each node, then its token
    sibling = outputs[5]  # next sibling of each node, then its depth; -1 for none, as for children
    read = FIRST
    for row in range(len(firsts) - 1):
        begin = firsts[row]
        root = roots[row]
        count = firsts[row + 1] - firsts[row]
        for node in range(count):
            parent = parents[begin + node]
            child[begin + node] = sibling[begin + node] = -1
            depths[begin + node] = depths[begin + parent] + 1 if node > 0 else 0
        for window in (True, False):  # whatever is put in later comes before
            for node in range(count - 1, root, -1):
                parent = parents[begin + node]
                if (parent == root and in_window[begin + node]) == window:
                    sibling[begin + node], child[begin + parent] = child[begin + parent], node
        slot = node = FIRST
        while slot < count:
            order[begin + slot], slots[begin + node] = begin + node, slot
            parent_slots[begin + slot] = slots[begin + parents[begin + node]] if node > 0 else -1
            slot += 1
            if node < root:
                node += 1
            elif child[begin + node] >= 0:
                node = child[begin + node]
            else:
                while node > root and sibling[begin + node] < 0:
                    node = parents[begin + node]
                node = sibling[begin + node] if node > root else node
        for slot in range(begin, begin + count):
            outputs[4, slot], outputs[5, slot], outputs[6, slot] = tokens[order[slot]], depths[order[slot]], row
            if reads[order[slot]]:
                outputs[7, read], outputs[8, read] = slot, order[slot]
                read += 1
    return read


def spread(firsts: Integers, counts: Integers) -> Integers:
    """Indices of the entries of all rows: `counts` of each, from its entry of `firsts` on."""
    ends = counts.cumsum()
    return np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
