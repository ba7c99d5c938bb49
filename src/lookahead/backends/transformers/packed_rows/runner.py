"""Runs the trees of many texts in one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, OneNodeResult, forward_results
from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.invariant.attention import PACKED_ROWS as INVARIANT
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.packed_rows.attention import PackedStep
from lookahead.backends.transformers.packed_rows.cache import PackedCache, Row
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.slot_limit import SlotLimit
from lookahead.core.token_tree import ONE_NODE, Layout, TokenTree, lay_out

_ONE_ROW = ((0, 1),)
"""Where the nodes of a step of one node begin and end."""


class PackedRowsRunner:
    """A backend whose rows come and go.

    The trees of a step lie one after another in one row of tokens, `[1, nodes of all rows]`, without padding. Each row
    has keys and values of its own, so that one that joins or leaves moves nothing of the others.

    Args:
        model: A model whose attention is `packed_rows.attention`; see `packed_rows_model`.
        positions_end: See `PositionLimit`.

    Attributes:
        rows: The rows of the coming step, one for each sequence of the batch. Between two steps they may become others.
        is_invariant: Whether the bits of a node depend on its own text alone; see `LookaheadConfig.invariant`.
        context, last_length, broken_after: See `PositionLimit`.
        changes_after: Longest text that is read alike whatever the other rows are; longer ones cannot be run.
    """

    def __init__(self, model: PreTrainedModel, positions_end: bool = True) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._device = model.device
        self.is_invariant = model.config._attn_implementation == INVARIANT
        self._masks = MaskBuilder(model.config)
        self._limit = limit = PositionLimit(model.config, positions_end)
        self.context, self.last_length, self.broken_after = limit.context, limit.last_length, limit.broken_after
        places = SlotLimit(model.config).first
        self.changes_after = min((text for text in (limit.changes_after, places) if text is not None), default=None)
        self._reach = self._masks.shortest_reach
        self._no_masks = {kind: [None] for kind in self._masks.kinds}
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        self._is_plain = self._keeps_logits and not self.is_invariant
        self._layouts: list[Layout] = []
        self._idle = TokenTree([0])
        self._idle.needs_logits[0] = False

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

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult | OneNodeResult]:
        """Run the model on one tree for each row; their keys and values wait for `commit`.

        Args:
            trees: One for each row.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """
        if self._runs_alone(trees):
            return [self._forward_one(trees[0].tokens[0], top_k)]
        self._layouts = [lay_out(tree) for tree in trees]
        ends = np.cumsum([len(layout.order) for layout in self._layouts]).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        starts = [0 if tree is self._idle else row.length for row, tree in zip(self.rows, trees, strict=True)]
        positions = [start + layout.depths for start, layout in zip(starts, self._layouts, strict=True)]
        reads = [start + layout.read_slots for (start, _), layout in zip(bounds, self._layouts, strict=True)]
        masks = {kind: self._row_masks(kind, positions) for kind in self._masks.kinds}
        keep = torch.from_numpy(np.concatenate(reads)).to(self._device)
        tokens = self._row_of_tokens([layout.tokens for layout in self._layouts])
        logits = self._logits(tokens, self._row_of_tokens(positions), bounds, masks, keep)
        # transformers chooses tokens from float32 logits whatever the model's own type
        logits = (logits if self._keeps_logits else logits[keep]).float()  # [reads of all rows, vocabulary]
        lengths = [len(layout.order) for layout in self._layouts]
        return forward_results(lengths, [layout.order[layout.read_slots] for layout in self._layouts], logits, top_k)

    def _runs_alone(self, trees: Sequence[TokenTree]) -> bool:
        """Whether this is a step of plain decoding of one row, in which each layer sees all the text."""
        if len(trees) != 1 or len(trees[0]) != 1 or not self._is_plain or trees[0] is self._idle:
            return False
        return trees[0].needs_logits[0] and self._sees_all(self.rows[0].length + 1)

    def _forward_one(self, token: int, top_k: int) -> OneNodeResult:
        """`forward` for a step of plain decoding, which has little time for anything beside the pass."""
        self._layouts = [ONE_NODE]
        both = torch.tensor([[[token]], [[self.rows[0].length]]], device=self._device)
        logits = self._logits(both[0], both[1], _ONE_ROW, self._no_masks, 1)
        return OneNodeResult(logits.float(), top_k)

    def _logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        bounds: Sequence[tuple[int, int]],
        masks: Mapping[str, Sequence[torch.Tensor | None]],
        keep: torch.Tensor | int,
    ) -> torch.Tensor:
        """What the model says after the nodes `keep`, or after all where it cannot be told: `[nodes, vocabulary]`."""
        cache = PackedCache(self.rows, bounds)
        # the position of a single node is where its keys and values go
        with cache.scratch(positions[0] if bounds is _ONE_ROW else None):
            logits: torch.Tensor = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                packed_rows=PackedStep(bounds, masks, self._masks.layers, cache),
                **({"logits_to_keep": keep} if self._keeps_logits else {}),
            ).logits[0]
        return logits

    def _sees_all(self, length: int) -> bool:
        """Whether each layer sees all of a text of so many tokens."""
        return self._reach is None or length <= self._reach

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of `kept`, for each row a path of nodes from its tree's first one downwards, and
        forget the other nodes."""
        if self._layouts[0] is ONE_NODE and kept[0]:
            self.rows[0].cache.commit_one()
            return
        for row, layout, nodes in zip(self.rows, self._layouts, kept, strict=True):
            if nodes:
                row.cache.commit([layout.slots[list(nodes)].tolist()])

    def _row_of_tokens(self, parts: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))[None].to(self._device)

    def _row_masks(
        self, kind: str, positions: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]
    ) -> list[torch.Tensor | None]:
        """What layers of a kind add to the scores of each row, see `PackedStep.masks`."""
        masks: list[torch.Tensor | None] = []
        for row, layout, own in zip(self.rows, self._layouts, positions, strict=True):
            if self.is_invariant:
                masks.append(self._masks.packed(kind, layout.ancestor_mask()[None], [row.length], own[None]))
                continue
            if len(own) == 1 and self._sees_all(row.length + 1):
                masks.append(None)
                continue
            keys = np.concatenate([np.arange(row.length), own])
            visible = np.ones((len(own), len(keys)), dtype=np.bool_)
            visible[:, row.length :] = layout.ancestor_mask()
            seen = self._masks.seen(kind, visible[None], own[None], keys[None])
            plain = len(own) == 1 or row.length == 0  # where no mask says that each sees all before it
            if plain and np.array_equal(seen[0], np.tri(len(own), len(keys), len(keys) - len(own), dtype=np.bool_)):
                masks.append(None)
            else:
                masks.append(self._masks.additive(seen, self.model.dtype, self._device))
        return masks
