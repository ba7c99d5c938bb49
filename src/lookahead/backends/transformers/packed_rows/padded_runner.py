"""Runs the trees of many texts, padded to the same size, on models whose rows cannot be packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, forward_result
from lookahead.backends.transformers.packed_rows.padded_cache import PaddedCache
from lookahead.backends.transformers.packed_rows.rows_runner import RowsRunner
from lookahead.config import MAX_NODES_PER_STEP
from lookahead.core.token_tree import TokenTree, lay_out

LARGE = 64
"""A tree of more nodes, such as a part of a prompt, has a pass of its own: others would be padded to its size."""


class PaddedRowsRunner(RowsRunner):
    """The trees of a step are rows of a batch, padded to the largest of them.

    Any model that runs trees can do so. But padding is computed for nothing, and the keys and values of all rows are
    copied for each pass, to those of the longest text.

    Args:
        model: A model that runs token trees.
        positions_end: See `PositionLimit`.
        together: Whether rows of different lengths may share a pass; else each has its own.
    """

    def __init__(self, model: PreTrainedModel, positions_end: bool = True, together: bool = True) -> None:
        super().__init__(model, positions_end)
        self._together = together

    def wants_draft(self, tree: TokenTree) -> bool:
        """See `RowsRunner`; nor where the model would go by the draft's places in the cache."""
        longest = max(row.length for row in self.rows)
        return super().wants_draft(tree) and self._slots.allows(longest, tree.root + MAX_NODES_PER_STEP)

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> list[ForwardResult]:
        """See `RowsRunner`."""
        self._layouts = [lay_out(tree) for tree in trees]
        together = [place for place, tree in enumerate(trees) if self._together and len(tree) <= LARGE]
        alone = [[place] for place in range(len(trees)) if place not in together]
        found: dict[int, ForwardResult] = {}
        for places in ([together] if together else []) + alone:
            results = self._pass(places, [trees[place] for place in places], top_k)
            found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(trees))]

    def _pass(self, places: Sequence[int], trees: Sequence[TokenTree], top_k: int) -> list[ForwardResult]:
        """One forward pass for some of the rows."""
        layouts = [self._layouts[place] for place in places]
        rows = [self.rows[place] for place in places]
        counts = [len(layout.order) for layout in layouts]
        tokens = np.zeros((len(rows), max(counts)), dtype=np.int64)
        positions = np.zeros_like(tokens)
        for place, (layout, row, tree, count) in enumerate(zip(layouts, rows, trees, counts, strict=True)):
            tokens[place, :count] = layout.tokens
            positions[place, :count] = layout.depths + (0 if tree is self._idle else row.length)
        keep = np.unique(np.concatenate([layout.read_slots for layout in layouts]))
        cache: Any = rows[0].cache if len(rows) == 1 else PaddedCache(rows, counts)
        # Places would have to be on the device of the last layer, where hooks do not bring them.
        by_place = self._keeps_logits and not hasattr(self.model, "hf_device_map")
        inputs: dict[str, Any] = {"logits_to_keep": torch.from_numpy(keep).to(self._device)} if by_place else {}
        if len(rows) > 1 or not trees[0].is_chain:
            inputs["attention_mask"] = self._mask(places, positions)
        with cache.scratch():
            logits = self.model(
                input_ids=torch.from_numpy(tokens).to(self._device),
                position_ids=torch.from_numpy(positions).to(self._device),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **inputs,
            ).logits
        # transformers chooses tokens from float32 logits whatever the model's own type
        logits = (
            logits if by_place else logits[:, torch.from_numpy(keep).to(logits.device)]
        ).float()  # [rows, keep, vocabulary]
        reads = [np.searchsorted(keep, layout.read_slots) for layout in layouts]
        return [
            forward_result(count, layout.order[layout.read_slots], logits[place], top_k, reads[place])
            for place, (layout, count) in enumerate(zip(layouts, counts, strict=True))
        ]

    def _mask(self, places: Sequence[int], positions: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Any:
        """Which of all tokens and nodes each node sees, in the form that the model takes."""
        lengths = [self.rows[place].length for place in places]
        longest, nodes = max(lengths), positions.shape[1]
        visible = np.zeros((len(places), nodes, longest + nodes), dtype=np.bool_)
        # A padding node sees itself alone, so that no row of the softmax is empty.
        visible[:, np.arange(nodes), longest + np.arange(nodes)] = True
        for place, length in enumerate(lengths):
            layout = self._layouts[places[place]]
            own = len(layout.order)
            visible[place, :own, :length] = True
            visible[place, :own, longest : longest + own] = layout.ancestor_mask()
        texts = np.broadcast_to(np.arange(longest), (len(places), longest))
        keys = np.concatenate([texts, positions], axis=1)
        return self._masks.build(visible, positions, keys, self.model.dtype, self._device)
