"""Run a llama.cpp model on token trees: rows of a call, rows that join and leave, and a chain."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.base import Runner, TextRow, check_chain
from lookahead.backends.forward_result import PassResult, pass_result
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES, LlamaContext
from lookahead.backends.llama_cpp.file import LlamaModel
from lookahead.core.forest import Forest, Layout, lay_out
from lookahead.core.sequence import common_start
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

ID_BYTES = np.dtype(np.int32).itemsize

LONGEST_DRAFTED_PREFILL = 32
"""Most pending tokens of a step with drafts. A longer prompt is read without drafts, as in plain decoding."""

RESTS = 4
"""Consecutive steps without drafts before rows return the extra sequence ids of their trees, which cost time."""


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
            ids = self._spare[:missing]
            self._spare = self._spare[missing:]
            if row.length:
                for sequence in ids:
                    self.context.copy(row.ids[0], sequence)
            row.set_ids([*row.ids, *ids])
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


class LlamaRunner(Runner):
    """Run rows of text in one context, and the trees that continue them.

    Each leaf of a tree is a llama.cpp sequence, which shares the cells of its ancestors with other leaves. So one call
    runs the trees of all rows. Each row keeps one sequence id, and gets more as its trees need them. All ids of a row
    hold the row's text.

    Args:
        context: An empty context with at least one sequence id for each row.
        rows: Number of rows.
        last_length: Longest text that the model can read; `None` without a limit.
    """

    def __init__(self, context: LlamaContext, rows: int, last_length: int | None = None) -> None:
        super().__init__()
        self.llama_context = context
        self.context = self.last_length = last_length
        self._ids = SequenceIds(context)
        self.rows = [self.new_row() for _ in range(rows)]
        self._branches: list[Branches | None] = []
        self._plain_steps = 0  # one after another
        self._first: Sequence[int] = ()  # the first row's text, which grows

    def new_row(self, block: int | None = None) -> LlamaRow:
        """Return an empty row. `block` is ignored, as llama.cpp allocates cells one by one."""
        return LlamaRow(self._ids)

    def resume(self, text: Sequence[int]) -> int:
        """Let the first row begin with the start of `text` that the context holds; return its number of tokens."""
        common = common_start(self.llama_context.text, text[:-1])  # logits after the last token need a pass
        if common:
            self._ids.give(self.rows[:1], [1])
            self.rows[0].crop(common)
        else:
            self.llama_context.clear()
        return common

    @property
    def first_text(self) -> list[int]:
        """Tokens of the first row with keys and values in the context."""
        return list(self._first[: self.rows[0].length])

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens of `row`."""
        if row == 0:
            self._first = text
        return super().begin_tree(row, text)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether to draft onto `tree`: its logits are needed, and it is no long prompt."""
        return tree.root < LONGEST_DRAFTED_PREFILL and tree.reads_root

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Run the trees of all rows. Their keys and values stay in the context until `commit`."""
        forest = Forest.of(trees)
        self._plain_steps = self._plain_steps + 1 if len(forest.tokens) == len(forest) else 0
        if self._plain_steps == RESTS:
            for row in self.rows:
                self._ids.take_back(row, left=1)
        self._branches = [
            None if tree is self._idle else branches(tree, forest.layout(row)) for row, tree in enumerate(forest)
        ]
        self._ids.give(self.rows, [0 if below is None else below.leaves for below in self._branches])
        count = 0
        for row, below in zip(self.rows, self._branches, strict=True):
            if below is not None:
                self._place(row, below, count)
                count += len(below.layout.order)
        logits = torch.from_numpy(self.llama_context.run(count, len(forest.read_slots)))
        return pass_result(forest, logits, top_k, borrowed=True)

    def commit(self, nodes_to_keep: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the last trees, and remove the other nodes."""
        for row, below, path in zip(self.rows, self._branches, nodes_to_keep, strict=True):
            if below is not None:
                self._commit(row, below, path)

    def _place(self, row: LlamaRow, below: Branches, start: int) -> None:
        """Write the nodes of a row's tree into the batch, from index `start`."""
        batch = self.llama_context.batch
        layout = below.layout
        place = slice(start, start + len(layout.order))
        batch.tokens[place] = layout.tokens
        batch.positions[place] = row.length + layout.depths
        batch.reads[place] = 0
        batch.reads[start + layout.read_slots] = 1
        batch.sequences[place] = row.address + ID_BYTES * below.first
        batch.counts[place] = below.last - below.first + 1
        # Pending tokens belong to all ids of the row, including ids that this tree does not use.
        batch.counts[start : start + layout.pending] = len(row.ids)

    def _commit(self, row: LlamaRow, below: Branches, path: Sequence[int]) -> None:
        start = row.length
        pending = below.layout.pending
        end = start + len(path)
        decided = start + min(pending, len(path))
        row.length = end
        if len(path) == pending == len(below.layout.order):
            return
        keep = row.ids[int(below.first[below.layout.slots[path[-1]]]) if path else 0]
        # Ids beyond the tree's leaves hold only decided text, so there is nothing to remove.
        for sequence in row.ids[: below.leaves] if len(path) >= pending else row.ids:
            self.llama_context.remove(sequence, end if sequence == keep else decided)
        if end > decided:
            for sequence in row.ids:
                if sequence != keep:
                    self.llama_context.copy(keep, sequence, decided, end)


_TEXT = 0
_SAVED = 1
"""Sequence ids: the text, and the text as it was before a draft."""


class LlamaChainRunner(LlamaRunner):
    """Run one text on a recurrent or hybrid model. The context has two sequence ids.

    Before a draft, the text is copied to the second sequence; llama.cpp copies the state when one of the two grows. If
    the whole draft is accepted, the new state stays. Otherwise the text is restored from the second sequence, and the
    accepted tokens are sent again before the next draft, as pending tokens.
    """

    chains = True

    def resume(self, text: Sequence[int]) -> int:
        """Begin with the text in the context if `text` continues it; return its number of tokens, else 0."""
        cached = self.llama_context.text
        if not 0 < len(cached) < len(text) or list(text[: len(cached)]) != cached:
            self.llama_context.clear()
            return 0
        return super().resume(text)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return `True`: where a draft is not possible, `tree` has no capacity for one."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Run the model on one chain. `commit` keeps or restores the state."""
        (tree,) = trees
        check_chain(tree)
        if not tree.is_chain:
            self._copy(_TEXT, _SAVED)
        return super().forward(trees, top_k)

    def commit(self, nodes_to_keep: Sequence[Sequence[int]]) -> None:
        """Keep the state if all nodes of the last tree are `nodes_to_keep`; otherwise restore the state before it."""
        assert self._branches[0] is not None
        if len(nodes_to_keep[0]) == len(self._branches[0].layout.order):
            self.rows[0].length += len(nodes_to_keep[0])
        else:
            self._copy(_SAVED, _TEXT)

    def _copy(self, source: int, target: int) -> None:
        self.llama_context.remove(target)
        self.llama_context.copy(source, target)


class LlamaRowsRunner(LlamaRunner):
    """Run the rows of many requests. Each row has its own sequence ids; all rows share the cells of one context.

    Args:
        llama: The model.
        model: The model in transformers' interface.
        cells: Number of cells, one for the keys and values of each token.
        max_rows: Most rows of a step; at most the number of sequence ids.
    """

    keeps_apart = True

    def __init__(self, llama: LlamaModel, model: Any, cells: int, max_rows: int) -> None:
        super().__init__(llama.acquire(cells, MOST_SEQUENCES), 0, llama.last_length)
        weakref.finalize(self, llama.release, self.llama_context)
        self.model = model
        self.most_nodes = MOST_SEQUENCES // max_rows + 1  # a sequence id for each leaf
        self._bytes = llama.token_bytes

    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return self._bytes
