"""Runs a llama.cpp model on token trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.backends.forward_result import ForwardResult, forward_results
from lookahead.backends.llama_cpp.branches import Branches, branches
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES, LlamaContext
from lookahead.backends.llama_cpp.rows import LlamaRow, SequenceIds
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

LONGEST_DRAFTED_PREFILL = 32
"""Pending tokens up to which a step may also draft. A longer prompt is read alone, as plain decoding reads it."""

RESTS = 4
"""Steps of one token after which a row gives the ids back that it had for its trees: a token of several sequences takes
llama.cpp longer."""

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

    Attributes:
        rows: The rows. Between two steps others may take their place, or they may become more or fewer.

    Raises:
        InvalidArgumentError: There are more rows than sequence ids.
    """

    def __init__(self, context: LlamaContext, rows: int, last_length: int | None = None) -> None:
        if rows > context.sequences:
            raise InvalidArgumentError(
                f"input_ids has {rows} rows, but llama.cpp has {MOST_SEQUENCES} sequences; call generate with fewer"
            )
        self.llama_context = context
        self.last_length = last_length
        self._ids = SequenceIds(context)
        self.rows = [self.new_row() for _ in range(rows)]
        self._sent: list[tuple[TokenTree, Branches] | None] = []
        self._plain_steps = 0  # one after another
        self._first: Sequence[int] = ()  # the first row's text, which grows
        self._idle = TokenTree([0])
        self._idle.needs_logits[self._idle.root] = False

    def new_row(self) -> LlamaRow:
        """An empty row."""
        return LlamaRow(self._ids)

    def resume(self, text: Sequence[int]) -> int:
        """Let the first row begin with what the context holds of `text`; returns how many tokens these are."""
        known, most = self.llama_context.text, len(text) - 1  # the last token is always computed, to see what follows
        pairs = enumerate(zip(known, text[:most], strict=False))
        common = next((place for place, (old, new) in pairs if old != new), min(len(known), most))
        if common:
            self._ids.give(self.rows[:1], [1])
            self.rows[0].crop(common)
        else:
            self.llama_context.clear()
        return common

    @property
    def first_text(self) -> list[int]:
        """The tokens of the first row whose keys and values are kept."""
        return list(self._first[: self.rows[0].length])

    def idle_tree(self) -> TokenTree:
        """What a row that is finished stands with: it is not sent."""
        return self._idle

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of row `row`, whose text so far is `text`: its pending tokens.

        Where these are more than `LlamaRow.most_pending`, it is so many of them, and nothing is read after them.
        """
        if row == 0:
            self._first = text
        cached, most = self.rows[row].length, self.rows[row].most_pending
        if most is not None and len(text) - cached > most:
            part = TokenTree(text[cached : cached + most])
            part.needs_logits[part.root] = False
            return part
        return TokenTree(text[cached:], None if self.last_length is None else self.last_length - 1 - cached)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`: not onto a prompt, unless it is short."""
        return tree.root < LONGEST_DRAFTED_PREFILL and tree.needs_logits[tree.root]

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send nothing ahead: llama.cpp itself computes long texts in parts."""
        return 0

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Nothing: what llama.cpp holds is not handed on."""

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult]:
        """Run the model on one tree for each row; their keys and values wait in the context for `commit`.

        Args:
            trees: One for each row.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """
        if len(trees) == 1 and len(trees[0]) == 1 and trees[0].needs_logits[0]:
            return [self._forward_token(trees[0], top_k)]
        self._plain_steps = 0
        self._sent = [None if tree is self._idle else (tree, branches(tree)) for tree in trees]
        self._ids.give(self.rows, [0 if sent is None else sent[1].leaves for sent in self._sent])
        count = 0
        for row, sent in zip(self.rows, self._sent, strict=True):
            if sent is not None:
                self._place(row, *sent, count)
                count += len(sent[0])
        logits = torch.from_numpy(self.llama_context.run(count))
        nodes = [
            _NO_NODES if sent is None else sent[1].order[np.array(tree.needs_logits)[sent[1].order]]
            for tree, sent in zip(trees, self._sent, strict=True)
        ]
        return forward_results([len(tree) for tree in trees], nodes, logits, top_k, borrowed=True)

    def _forward_token(self, tree: TokenTree, top_k: int) -> ForwardResult:
        """A step of plain decoding, which is little work for a small model: with as little around it."""
        row = self.rows[0]
        self._plain_steps += 1
        self._ids.collect()
        if not len(row.ids):
            self._ids.give(self.rows, [1])
        elif self._plain_steps == RESTS and len(row.ids) > 1:
            self._ids.trim(row)
        self._sent = [(tree, _ONE_TOKEN)]
        logits = torch.from_numpy(self.llama_context.run_token(tree.tokens[0], row.length, row.ids))[None]
        return forward_results([1], [_ONE_TOKEN.order], logits, top_k, borrowed=True)[0]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of `kept`, for each row a path of nodes from its tree's first one downwards, and
        forget the other nodes."""
        if len(kept) == len(kept[0]) == 1 and self._sent[0] is not None and self._sent[0][1] is _ONE_TOKEN:
            self.rows[0].length += 1
            return
        for row, sent, path in zip(self.rows, self._sent, kept, strict=True):
            if sent is not None:
                self._commit(row, *sent, path)

    def rewind(self, row: int, length: int) -> None:
        """Forget a row's text from `length` tokens on."""
        self.rows[row].crop(length)

    def _place(self, row: LlamaRow, tree: TokenTree, below: Branches, start: int) -> None:
        """Put the nodes of a row's tree, in slots, into the batch from `start` on."""
        batch, ids, order = self.llama_context.batch, row.ids, below.order
        place = slice(start, start + len(tree))
        batch.tokens[place] = np.array(tree.tokens)[order]
        batch.positions[place] = np.array(tree.depths)[order]
        batch.positions[place] += row.length
        batch.reads[place] = np.array(tree.needs_logits)[order]
        batch.sequences[place] = ids.ctypes.data + ids.itemsize * below.first
        batch.counts[place] = below.last - below.first + 1
        # Decided text belongs to all ids, whether or not this tree uses them.
        batch.counts[start : start + tree.root + 1] = len(ids)

    def _commit(self, row: LlamaRow, tree: TokenTree, below: Branches, path: Sequence[int]) -> None:
        start, pending = row.length, tree.root + 1
        end, decided = start + len(path), start + min(pending, len(path))
        row.length = end
        if tree.is_chain and len(path) == pending:
            return
        ids = row.ids.tolist()
        keep = int(below.first[below.slots[path[-1]]]) if path else 0
        # Of ids beyond the tree's leaves, decided text alone.
        for leaf in range(below.leaves if len(path) >= pending else len(ids)):
            self.llama_context.remove(ids[leaf], end if leaf == keep else decided, -1)
        if end > decided:
            for leaf in range(len(ids)):
                if leaf != keep:
                    self.llama_context.copy(ids[keep], ids[leaf], decided, end)
