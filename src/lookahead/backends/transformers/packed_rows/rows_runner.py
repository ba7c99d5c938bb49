"""What runs the trees of many texts, whose rows come and go, in one way or another."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, OneNodeResult
from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.invariant.attention import PACKED_ROWS as INVARIANT
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.packed_rows.cache import Row
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.slot_limit import SlotLimit
from lookahead.config import MAX_NODES_PER_STEP
from lookahead.core.token_tree import ONE_NODE, Layout, TokenTree


class RowsRunner:
    """A backend whose rows come and go. Each row has keys and values of its own; passes are made by subclasses.

    Args:
        model: What runs.
        positions_end: See `PositionLimit`.

    Attributes:
        rows: The rows of the coming step, one for each sequence of the batch. Between two steps they may become others.
        is_invariant: Whether the bits of a node depend on its own text alone; see `LookaheadConfig.invariant`.
        context, last_length, broken_after: See `PositionLimit`.
        changes_after: Longest text that is read alike whatever the other rows are; longer ones cannot be run.
        most_nodes: Nodes that the tree of each row may have.
        keeps_apart: Whether finished texts take memory of their own, so that running rows cannot use it.
    """

    most_nodes = MAX_NODES_PER_STEP
    keeps_apart = False

    def __init__(self, model: PreTrainedModel, positions_end: bool = True) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._device = model.device
        self.is_invariant = model.config._attn_implementation == INVARIANT
        self._masks = MaskBuilder(model.config)
        self._limit = limit = PositionLimit(model.config, positions_end)
        self._slots = SlotLimit(model.config)
        self.context, self.last_length, self.broken_after = limit.context, limit.last_length, limit.broken_after
        places = self._slots.first
        self.changes_after = min((text for text in (limit.changes_after, places) if text is not None), default=None)
        self._reach = self._masks.shortest_reach
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        self._is_plain = self._keeps_logits and not self.is_invariant
        self._layouts: list[Layout] = []
        self._idle = TokenTree([0])
        self._idle.needs_logits[0] = False

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult | OneNodeResult]:
        """Run the model on one tree for each row; their keys and values wait for `commit`.

        Args:
            trees: One for each row.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """
        raise NotImplementedError

    def new_row(self, block: int | None = None) -> Row:
        """An empty row, whose room grows by `block` tokens."""
        return Row(block)

    def token_bytes(self) -> int:
        """Bytes that keys and values of a token take, found by running one."""
        self.rows = [Row(1)]
        self.forward([TokenTree([0])])
        return self.rows.pop().cache.token_bytes

    def idle_tree(self) -> TokenTree:
        """What a row sends that stays although its text is complete: a token that nobody reads, at position 0."""
        return self._idle

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of sequence `row`, whose text so far is `text`: its pending tokens.

        Where these are more than `Row.most_pending`, it is so many of them, and nothing is read after them.
        """
        cached, most = self.rows[row].length, self.rows[row].most_pending
        if most is not None and len(text) - cached > most:
            part = TokenTree(text[cached : cached + most])
            part.needs_logits[part.root] = False
            return part
        deepest = self._limit.deepest(len(text) - 1)
        return TokenTree(text[cached:], None if deepest is None else deepest - cached)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`: not if it is a part of a text."""
        return tree.needs_logits[tree.root]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of `kept`, for each row a path of nodes from its tree's first one downwards, and
        forget the other nodes."""
        if self._layouts[0] is ONE_NODE and kept[0]:
            self.rows[0].cache.commit_one()
            return
        for row, layout, nodes in zip(self.rows, self._layouts, kept, strict=True):
            if nodes:
                row.cache.commit([layout.slots[list(nodes)].tolist()])

    def _runs_alone(self, trees: Sequence[TokenTree]) -> bool:
        """Whether this is a step of plain decoding of one row, in which each layer sees all the text."""
        if len(trees) != 1 or len(trees[0]) != 1 or not self._is_plain or trees[0] is self._idle:
            return False
        return trees[0].needs_logits[0] and self._sees_all(self.rows[0].length + 1)

    def _sees_all(self, length: int) -> bool:
        """Whether each layer sees all of a text of so many tokens."""
        return self._reach is None or length <= self._reach
