"""Runs a llama.cpp model on token trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.backends.forward_result import ForwardResult, forward_result
from lookahead.backends.llama_cpp.branches import Branches, branches
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES, LlamaContext
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

LONGEST_DRAFTED_PREFILL = 32
"""Pending tokens up to which a step may also draft. A longer prompt is read alone, as plain decoding reads it."""

_NO_NODES = np.empty(0, dtype=np.int64)
_ONE_TOKEN = branches(TokenTree([0]))


class LlamaRunner:
    """Some rows of text in one context, and the trees that continue them.

    Each leaf of a tree is a sequence of llama.cpp's, which shares the cells of the nodes above it with others. So one
    call runs the trees of all rows. Each row has one sequence id for good and others as its trees need them; all of a
    row's ids hold the row's text.

    Args:
        context: Where keys and values are; empty.
        rows: Rows of text.
        last_length: Text length at which the model can read no further token, if there is one.

    Raises:
        InvalidArgumentError: There are more rows than sequence ids.
    """

    def __init__(self, context: LlamaContext, rows: int, last_length: int | None = None) -> None:
        if rows > context.sequences:
            raise InvalidArgumentError(
                f"input_ids has {rows} rows, but llama.cpp has {MOST_SEQUENCES} sequences; call generate with fewer"
            )
        self.context = context
        self.last_length = last_length
        self._lengths = [0] * rows
        self._ids = [np.array([row], dtype=np.int32) for row in range(rows)]
        self._spare = list(range(rows, context.sequences))
        self._sent: list[tuple[TokenTree, Branches] | None] = []

    def idle_tree(self) -> TokenTree:
        """What a row that is finished stands with: it is not sent."""
        tree = TokenTree([0])
        tree.needs_logits[tree.root] = False
        return tree

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of row `row`, whose text so far is `text`: its pending tokens."""
        cached = self._lengths[row]
        return TokenTree(text[cached:], None if self.last_length is None else self.last_length - 1 - cached)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`: not onto a prompt, unless it is short."""
        return tree.root < LONGEST_DRAFTED_PREFILL

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send nothing ahead: llama.cpp itself computes long texts in parts."""
        return 0

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Nothing: what llama.cpp holds is not handed on."""

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> list[ForwardResult]:
        """Run the model on one tree for each row; their keys and values wait in the context for `commit`.

        Args:
            trees: One for each row.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """
        if len(trees) == 1 and len(trees[0]) == 1:
            return [self._forward_token(trees[0], top_k)]
        self._sent = [(tree, branches(tree)) if any(tree.needs_logits) else None for tree in trees]
        self._take_ids([0 if sent is None else sent[1].leaves for sent in self._sent])
        count = 0
        for row, sent in enumerate(self._sent):
            if sent is not None:
                self._place(row, *sent, count)
                count += len(sent[0])
        logits = torch.from_numpy(self.context.run(count))
        results, used = [], 0
        for tree, sent in zip(trees, self._sent, strict=True):
            nodes = _NO_NODES if sent is None else sent[1].order[np.array(tree.needs_logits)[sent[1].order]]
            results.append(forward_result(len(tree), nodes, logits[used : used + len(nodes)], top_k, borrowed=True))
            used += len(nodes)
        return results

    def _forward_token(self, tree: TokenTree, top_k: int) -> ForwardResult:
        """A step of plain decoding, which is little work for a small model: with as little around it."""
        self._sent = [(tree, _ONE_TOKEN)]
        batch, ids = self.context.batch, self._ids[0]
        batch.tokens[0], batch.positions[0], batch.reads[0] = tree.tokens[0], self._lengths[0], 1
        batch.sequences[0], batch.counts[0] = ids.ctypes.data, len(ids)
        logits = torch.from_numpy(self.context.run(1))
        return forward_result(1, _ONE_TOKEN.order, logits, top_k, borrowed=True)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of `kept`, for each row a path of nodes from its tree's first one downwards, and
        forget the other nodes."""
        for row, (sent, path) in enumerate(zip(self._sent, kept, strict=True)):
            if sent is not None:
                self._commit(row, *sent, path)

    def rewind(self, row: int, length: int) -> None:
        """Forget a row's text from `length` tokens on."""
        for sequence in self._ids[row].tolist():
            self.context.remove(sequence, length, -1)
        self._lengths[row] = length

    def _place(self, row: int, tree: TokenTree, below: Branches, start: int) -> None:
        """Put the nodes of a row's tree, in slots, into the batch from `start` on."""
        batch, ids, order = self.context.batch, self._ids[row], below.order
        place = slice(start, start + len(tree))
        batch.tokens[place] = np.array(tree.tokens)[order]
        batch.positions[place] = np.array(tree.depths)[order]
        batch.positions[place] += self._lengths[row]
        batch.reads[place] = np.array(tree.needs_logits)[order]
        batch.sequences[place] = ids.ctypes.data + ids.itemsize * below.first
        batch.counts[place] = below.last - below.first + 1
        # Decided text belongs to all ids, whether or not this tree uses them.
        batch.counts[start : start + tree.root + 1] = len(ids)

    def _commit(self, row: int, tree: TokenTree, below: Branches, path: Sequence[int]) -> None:
        start, pending = self._lengths[row], tree.root + 1
        end, decided = start + len(path), start + min(pending, len(path))
        self._lengths[row] = end
        if tree.is_chain and len(path) == pending:
            return
        ids = self._ids[row].tolist()
        keep = int(below.first[below.slots[path[-1]]]) if path else 0
        # Of ids beyond the tree's leaves, decided text alone.
        for leaf in range(below.leaves if len(path) >= pending else len(ids)):
            self.context.remove(ids[leaf], end if leaf == keep else decided, -1)
        if end > decided:
            for leaf in range(len(ids)):
                if leaf != keep:
                    self.context.copy(ids[keep], ids[leaf], decided, end)

    def _take_ids(self, leaves: Sequence[int]) -> None:
        """Give each row at least as many sequence ids as its tree has leaves."""
        for row, count in enumerate(leaves):
            missing = count - len(self._ids[row])
            if missing <= 0:
                continue
            while len(self._spare) < missing:
                self._return_ids(leaves)
            taken, self._spare = self._spare[:missing], self._spare[missing:]
            for sequence in taken:
                self.context.copy(int(self._ids[row][0]), sequence, -1, -1)
            self._ids[row] = np.concatenate([self._ids[row], np.array(taken, dtype=np.int32)])

    def _return_ids(self, leaves: Sequence[int]) -> None:
        """Take back the ids of the row that has the most that it does not use in this step."""
        unused = [len(ids) - max(count, 1) for ids, count in zip(self._ids, leaves, strict=True)]
        row = int(np.argmax(unused))
        if unused[row] <= 0:
            raise InvalidArgumentError(
                f"the trees of a step have {sum(leaves)} leaves, but llama.cpp has {self.context.sequences} sequences; "
                "choose a smaller step_budget, or fewer rows"
            )
        for sequence in self._ids[row][max(leaves[row], 1) :].tolist():
            self.context.remove(sequence, -1, -1)
            self._spare.append(sequence)
        self._ids[row] = self._ids[row][: max(leaves[row], 1)].copy()
