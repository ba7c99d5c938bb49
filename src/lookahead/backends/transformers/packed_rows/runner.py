"""Runs the trees of many texts in one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, OneNodeResult, forward_results
from lookahead.backends.transformers.packed_rows.attention import PackedStep
from lookahead.backends.transformers.packed_rows.cache import PackedCache
from lookahead.backends.transformers.packed_rows.rows_runner import RowsRunner
from lookahead.core.token_tree import ONE_NODE, TokenTree, lay_out

_ONE_ROW = ((0, 1),)
"""Where the nodes of a step of one node begin and end."""


class PackedRowsRunner(RowsRunner):
    """The trees of a step lie one after another in one row of tokens, `[1, nodes of all rows]`, without padding.

    Each row has keys and values of its own, so that one that joins or leaves moves nothing of the others.

    Args:
        model: A model whose attention is `packed_rows.attention`; see `packed_rows_model`.
        positions_end: See `PositionLimit`.
    """

    def __init__(self, model: PreTrainedModel, positions_end: bool = True) -> None:
        super().__init__(model, positions_end)
        self._no_masks = {kind: [None] for kind in self._masks.kinds}

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult | OneNodeResult]:
        """See `RowsRunner`."""
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
