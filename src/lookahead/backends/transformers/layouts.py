"""Inputs of a pass: tokens, positions, masks and the logits to keep, for padded or packed trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.machine import upload
from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, MIN_NODES
from lookahead.backends.transformers.masks import PACKED_MASKS, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import PackedCache, PackedRows
from lookahead.backends.transformers.tree_attention.packed_mask import first_position, sight
from lookahead.backends.transformers.tree_cache import Integers
from lookahead.core.forest import Forest


@dataclass
class PassPlan:
    """The trees of a pass, and where each begins in its text.

    Attributes:
        forest: The trees.
        lengths: Cached tokens of each text, `[rows]` int64.
        starts: Index in the text of the first node of each tree, `[rows]`; 0 for an idle tree, which has none.
        shifts: Position id minus index in the text, `[rows]`; `None` if all are 0.
        dropped: Number of first tokens that layers with a window have dropped.
    """

    forest: Forest
    lengths: Integers
    starts: Integers
    shifts: Integers | None = None
    dropped: int = 0

    @property
    def counts(self) -> Integers:
        """Nodes of each tree, `[rows]`."""
        return self.forest.counts

    @cached_property
    def places(self) -> Integers:
        """Index in its text of the node in each slot, `[nodes]`."""
        return self.starts[self.forest.rows_of_slots] + self.forest.slot_depths

    @property
    def positions(self) -> Integers:
        """Position id of the node in each slot, `[nodes]`."""
        return self.places if self.shifts is None else self.places + self.shifts[self.forest.rows_of_slots]


@dataclass
class Inputs:
    """Arguments of the model.

    Attributes:
        tokens, positions: `[rows, nodes]` int64, where the model is.
        keep: Slots of each row with logits to read, ascending, `[keep]`.
        rows: Row of each of the forest's `read_slots` in the logits `[rows * keep, vocabulary]`; `None` if they have
            exactly these rows.
        arguments: Other arguments: masks, and the logits to keep.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: Integers
    rows: Integers | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Padded:
    """Layout of trees in rows, padded to the largest tree; in the cache, nodes follow the longest text.

    Args:
        model: The model.
        masks: Masks of the model; `None` for chains, which need none.
        device: Device of the inputs.

    Attributes:
        is_invariant: Whether the bits of a node depend only on its own text; see `LookaheadConfig.invariant`.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder | None, device: torch.device) -> None:
        self._masks = masks
        self._device = device
        self._dtype = model.dtype  # looking takes long
        attention = model.config._attn_implementation
        self.is_invariant = attention in (INVARIANT, BY_POSITION)
        self._packs = attention in PACKED_MASKS or device.type == "cuda"
        self._min_nodes: int = getattr(model, MIN_NODES, 1)
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        # Hooks do not move indices of logits to the device of the last layer.
        self._is_spread = hasattr(model, "hf_device_map")

    def inputs(self, plan: PassPlan, cache: object = None) -> Inputs:
        """Return the inputs of a pass; they do not depend on the cache."""
        forest = plan.forest
        rows = plan.forest.rows
        nodes = max(int(plan.counts.max()), -(-self._min_nodes // rows))
        if rows == 1:
            return self._upload(plan, *padded(plan, rows, nodes), forest.read_slots)
        rows_read = forest.rows_of_slots[forest.read_slots]
        slots_read = forest.read_slots - forest.firsts[rows_read]
        keep = np.unique(slots_read)
        inputs = self._upload(plan, *padded(plan, rows, nodes), keep)
        inputs.rows = rows_read * len(keep) + np.searchsorted(keep, slots_read)
        return inputs

    def _upload(
        self, plan: PassPlan, tokens: Integers, indices: Integers, positions: Integers, keep: Integers
    ) -> Inputs:
        """Copy all inputs to the device at once; `indices` in the text and `positions` are `[rows, nodes]`."""
        # A number keeps the last logits without a copy.
        keeps_last = len(keep) > 0 and tokens.shape[1] - int(keep[0]) == len(keep)
        picks = self._keeps_logits and not keeps_last and not self._is_spread
        picked = [keep.copy()] if picks else []
        # A plain step of one sequence uses transformers' own fast path, without a mask.
        plain = plan.forest.rows == 1 and plan.forest.is_plain and not self.is_invariant
        masks = None if plain else self._masks
        sights = masks.sights(plan.forest.ancestors(*tokens.shape), plan.lengths, indices) if masks else {}
        packed = [of_kind.packed() for of_kind in sights.values()] if self._packs else []
        tensors = upload(self._device, tokens, positions, *picked, *packed)
        inputs = Inputs(tensors[0], tensors[1], keep)
        if masks and packed:
            keys = int(plan.lengths.max()) + tokens.shape[1]
            packed_masks = tensors[len(tensors) - len(packed) :]
            inputs.arguments["attention_mask"] = masks.of_packed(packed_masks, keys, self._dtype, plan.dropped)
        elif masks:
            inputs.arguments["attention_mask"] = masks.dense(sights, self._dtype, self._device, plan.dropped)
        if picks:
            inputs.arguments["logits_to_keep"] = tensors[2]
        elif self._keeps_logits and keeps_last:
            inputs.arguments["logits_to_keep"] = len(keep)
        return inputs


def padded(plan: PassPlan, rows: int, nodes: int) -> tuple[Integers, Integers, Integers]:
    """Pad the trees of a pass, and return tokens, indices in the text, and positions, each `[rows, nodes]`.

    Padding is token 0 at position 0.
    """
    forest = plan.forest
    if rows == 1 and nodes == len(forest.tokens):
        places = plan.places[None]
        return forest.slot_tokens[None], places, places if plan.shifts is None else plan.positions[None]
    tokens, places = np.zeros((2, rows, nodes), dtype=np.int64)
    row = forest.rows_of_slots
    slot = np.arange(len(row)) - forest.firsts[row]
    tokens[row, slot], places[row, slot] = forest.slot_tokens, plan.places
    if plan.shifts is None:
        return tokens, places, places
    positions = places.copy()
    positions[row, slot] = plan.positions
    return tokens, places, positions


class Packed:
    """Layout of all trees in one row of tokens, `[1, nodes of all rows]`, without padding.

    Args:
        model: The model; its attention is `packed_rows_attention`.
        masks: Masks of the model.
        device: Device of the inputs.

    Attributes:
        is_invariant: See `Padded`.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder, device: torch.device) -> None:
        self._masks = masks
        self._device = device
        self._dtype = model.dtype
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        self.is_invariant = model.config._attn_implementation == INVARIANT_ROWS

    def inputs(self, plan: PassPlan, cache: PackedCache) -> Inputs:
        """Return the inputs of a pass; the attention function splits rows by the cache."""
        forest = plan.forest
        keep = plan.forest.read_slots
        tensors = upload(self._device, forest.slot_tokens[None], plan.positions[None], keep)
        inputs = Inputs(tensors[0], tensors[1], keep)
        masks = {kind: self._masks_of(kind, plan) for kind in self._masks.kinds}
        inputs.arguments["packed_rows"] = PackedRows(forest.counts.tolist(), masks, self._masks.layers, cache)
        if self._keeps_logits:
            alone = len(keep) == 1 == len(forest.tokens)  # a number keeps it without a copy
            inputs.arguments["logits_to_keep"] = 1 if alone else tensors[2]
        return inputs

    def _masks_of(self, kind: str, plan: PassPlan) -> list[torch.Tensor | None]:
        """Return the masks of each row for layers of a kind; see `PackedRows.masks`."""
        masks: list[torch.Tensor | None] = []
        reach = self._masks.reach(kind)
        hides = first_position(plan.places, *reach) > 0
        lengths = plan.lengths.tolist()
        for row, (begin, end) in enumerate(pairwise(plan.forest.firsts.tolist())):
            if not self.is_invariant and not hides[begin:end].any() and (end - begin == 1 or _is_whole(plan, row)):
                masks.append(None)
                continue
            ancestors = plan.forest.layout(row).ancestor_mask()[None]
            seen = sight(ancestors, lengths[row : row + 1], plan.places[None, begin:end], *reach)
            made = torch.from_numpy(seen.packed()) if self.is_invariant else seen.dense(self._dtype).to(self._device)
            masks.append(made)
        return masks


def _is_whole(plan: PassPlan, row: int) -> bool:
    """Return whether a tree is a text from its beginning, so that a causal mask is enough."""
    if plan.lengths[row]:
        return False
    mask = plan.forest.layout(row).ancestor_mask()
    return np.array_equal(mask, np.tri(len(mask)))
