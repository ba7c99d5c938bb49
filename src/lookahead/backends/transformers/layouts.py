"""Inputs of a pass: tokens, positions, masks and the logits to keep, for padded or packed trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.machine import upload
from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, MIN_NODES
from lookahead.backends.transformers.masks import PACKED_MASKS, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import PackedCache, PackedRows
from lookahead.backends.transformers.tree_attention import first_position
from lookahead.backends.transformers.tree_cache import Integers
from lookahead.core.forest import Forest, spread
from lookahead.core.tree_masks import MaskedTrees, dense_masks, packed_masks, packed_width


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
        plain_arguments: Further arguments of the model in a pass over the pending tokens of one text; `None` if it
            needs a mask or padding.
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
        self.plain_arguments: dict[str, Any] | None = None
        if not self.is_invariant and self._min_nodes == 1:
            self.plain_arguments = {"logits_to_keep": 1} if self._keeps_logits else {}
        # Hooks do not move indices of logits to the device of the last layer.
        self._is_spread = hasattr(model, "hf_device_map")

    def inputs(self, plan: PassPlan, cache: object = None) -> Inputs:
        """Return the inputs of a pass; they do not depend on the cache."""
        forest = plan.forest
        rows = plan.forest.rows
        nodes = len(forest.tokens) if rows == 1 else int(forest.counts.max())
        nodes = max(nodes, -(-self._min_nodes // rows))
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
        trees = padded_trees(plan.forest, plan.lengths, indices) if masks else None
        packed = masks.packed(trees) if masks and trees and self._packs else []
        tensors = upload(self._device, tokens, positions, *picked, *packed)
        inputs = Inputs(tensors[0], tensors[1], keep)
        if masks and packed:
            keys = int(plan.lengths.max()) + tokens.shape[1]
            packed_masks = tensors[len(tensors) - len(packed) :]
            inputs.arguments["attention_mask"] = masks.of_packed(packed_masks, keys, self._dtype, plan.dropped)
        elif masks and trees:
            inputs.arguments["attention_mask"] = masks.dense(trees, self._dtype, self._device, plan.dropped)
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


def padded_trees(forest: Forest, lengths: Integers, places: Integers) -> MaskedTrees:
    """Return padded trees for their masks.

    Args:
        forest: The trees; missing rows are padding.
        lengths: Cached tokens of each row, `[rows]`.
        places: Index in its text of each node, `[rows, nodes]`.
    """
    rows, nodes = places.shape
    parents = forest.parent_slots
    if places.size != len(parents):
        parents = np.full((rows, nodes), -2, dtype=np.int64)
        row = forest.rows_of_slots
        parents[row, np.arange(len(row)) - forest.firsts[row]] = forest.parent_slots
    return MaskedTrees(np.arange(rows + 1) * nodes, parents.reshape(-1), lengths, places.reshape(-1))


class Packed:
    """Layout of all trees in one row of tokens, `[1, nodes of all rows]`, without padding.

    Args:
        model: The model; its attention is `packed_rows_attention`.
        masks: Masks of the model.
        device: Device of the inputs.

    Attributes:
        is_invariant: See `Padded`.
        plain_arguments: See `Padded`.
    """

    plain_arguments: dict[str, Any] | None = None

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
        forest = plan.forest
        reach = self._masks.reach(kind)
        trees = MaskedTrees(forest.firsts, forest.parent_slots, plan.lengths, plan.places)
        bounds = list(pairwise(forest.firsts.tolist()))
        if self.is_invariant:
            packed = packed_masks(trees, *reach, packed_width(int(forest.counts.max())))
            parts = [packed[None, None, begin:end, : packed_width(end - begin)] for begin, end in bounds]
            return [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
        masks: list[torch.Tensor | None] = [None] * forest.rows
        rows = np.flatnonzero(_need_masks(trees, *reach))
        if len(rows):
            nodes = spread(forest.firsts[rows], forest.counts[rows])
            firsts = np.append(0, forest.counts[rows].cumsum())
            some = MaskedTrees(firsts, trees.parent_slots[nodes], plan.lengths[rows], plan.places[nodes])
            dense, begins = dense_masks(some, some.lengths, reach, torch.finfo(self._dtype).min)
            there = torch.from_numpy(dense).to(self._device, self._dtype)
            keys = (some.lengths + forest.counts[rows]).tolist()
            for row, begin, count, size in zip(rows.tolist(), begins.tolist(), np.diff(firsts), keys, strict=True):
                mask = there.narrow(0, begin, int(count) * size).view(1, 1, -1, size)
                masks[row] = mask if mask.is_cpu else mask.clone()  # kernels of CUDA need aligned addresses
        return masks


def _need_masks(trees: MaskedTrees, window: int | None, chunk: int | None) -> NDArray[np.bool_]:
    """Return whether each row needs a mask, `[rows]`.

    A single node that sees all tokens needs none. A text from its beginning needs none: attention is causal then.
    """
    begins = trees.firsts[:-1]
    counts = np.diff(trees.firsts)
    hides = np.logical_or.reduceat(first_position(trees.places, window, chunk) > 0, begins)
    steps = np.arange(len(trees.places)) - trees.parent_slots - 1 - np.repeat(begins, counts)
    is_path = ~np.logical_or.reduceat(steps != 0, begins)
    needed: NDArray[np.bool_] = hides | ((counts > 1) & ~((trees.lengths == 0) & is_path))
    return needed
