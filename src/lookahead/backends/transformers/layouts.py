"""Inputs of a pass: tokens, positions, masks and the logits to keep, for trees beside or behind one another."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.machine import upload
from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, LEAST_NODES
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
        dropped: Number of first tokens that layers with a window have forgotten.
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
        keep: Which nodes of each row are read, ascending, `[keep]`.
        rows: Row of each of the forest's `read_slots` in the logits, which have `keep` of each row, one row behind
            another; `None` if they hold nothing else.
        arguments: Other arguments: masks, and the logits to keep.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: Integers
    rows: Integers | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Padded:
    """Trees beside one another, each padded to the largest; the keys of all lie in columns, nodes behind the longest.

    Args:
        model: The model.
        masks: What masks it takes; `None` for chains, which are read in their order.
        device: Where inputs go.

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
        self._least_nodes: int = getattr(model, LEAST_NODES, 1)
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        # Places would have to be on the device of the last layer, where hooks do not move them.
        self._is_spread = hasattr(model, "hf_device_map")

    def inputs(self, plan: PassPlan, cache: object = None) -> Inputs:
        """The arguments of a pass; they do not depend on the cache."""
        forest = plan.forest
        rows = plan.forest.rows
        nodes = max(int(plan.counts.max()), -(-self._least_nodes // rows))
        if rows == 1:
            return self._bring(plan, *padded(plan, rows, nodes), forest.read_slots)
        rows_read = forest.rows_of_slots[forest.read_slots]
        slots_read = forest.read_slots - forest.firsts[rows_read]
        keep = np.unique(slots_read)
        found = self._bring(plan, *padded(plan, rows, nodes), keep)
        found.rows = rows_read * len(keep) + np.searchsorted(keep, slots_read)
        return found

    def _bring(self, plan: PassPlan, tokens: Integers, positions: Integers, placed: Integers, keep: Integers) -> Inputs:
        """All of it where the model is, by one copy."""
        # A number keeps the last ones, without the copy that picking them takes.
        keeps_last = len(keep) > 0 and positions.shape[1] - int(keep[0]) == len(keep)
        picks = self._keeps_logits and not keeps_last and not self._is_spread
        picked = [keep.copy()] if picks else []
        # Plain decoding of one sequence needs no mask of ours: transformers' own fast path applies.
        plain = plan.forest.rows == 1 and plan.forest.is_plain and not self.is_invariant
        masks = None if plain else self._masks
        sights = masks.sights(plan.forest.ancestors(*positions.shape), plan.lengths, positions) if masks else {}
        packed = [of_kind.packed() for of_kind in sights.values()] if self._packs else []
        sent = upload(self._device, tokens, placed, *picked, *packed)
        found = Inputs(sent[0], sent[1], keep)
        if masks and packed:
            keys = int(plan.lengths.max()) + positions.shape[1]
            packed_there = sent[len(sent) - len(packed) :]
            found.arguments["attention_mask"] = masks.of_packed(packed_there, keys, self._dtype, plan.dropped)
        elif masks:
            found.arguments["attention_mask"] = masks.dense(sights, self._dtype, self._device, plan.dropped)
        if picks:
            found.arguments["logits_to_keep"] = sent[2]
        elif self._keeps_logits and keeps_last:
            found.arguments["logits_to_keep"] = len(keep)
        return found


def padded(plan: PassPlan, rows: int, nodes: int) -> tuple[Integers, Integers, Integers]:
    """The trees of a pass, padded to `rows` and `nodes`: tokens, places in the text, and positions, each
    `[rows, nodes]`. Padding is token 0 at position 0."""
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
    """Trees one behind another in one row of tokens, `[1, nodes of all rows]`, without padding.

    Args:
        model: The model; its attention is `packed_rows_attention`.
        masks: Which kinds of layers it has.
        device: Where inputs go.

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
        """Arguments of a pass; the attention function finds rows by the cache."""
        forest = plan.forest
        keep = plan.forest.read_slots
        firsts = forest.firsts.tolist()
        sent = upload(self._device, forest.slot_tokens[None], plan.positions[None], keep)
        found = Inputs(sent[0], sent[1], keep)
        masks = {kind: self._masks_of(kind, plan) for kind in self._masks.kinds}
        bounds = [*pairwise(firsts)]
        found.arguments["packed_rows"] = PackedRows(bounds, masks, self._masks.layers, cache)
        if self._keeps_logits:
            alone = len(keep) == 1 == firsts[-1]  # a number keeps it without a copy
            found.arguments["logits_to_keep"] = 1 if alone else sent[2]
        return found

    def _masks_of(self, kind: str, plan: PassPlan) -> list[torch.Tensor | None]:
        """Masks of layers of a kind, added to the scores of each row; see `PackedRows.masks`."""
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
    """Whether a tree is a text from its beginning: then a causal mask is enough."""
    if plan.lengths[row]:
        return False
    mask = plan.forest.layout(row).ancestor_mask()
    return np.array_equal(mask, np.tri(len(mask)))
