"""How the trees of one pass lie beside or behind one another, and what the model takes of them: tokens, positions,
masks, and which logits are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.machine import upload
from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, LEAST_NODES
from lookahead.backends.transformers.masks import PACKED_MASKS, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import PackedCache, StaticTreeCache
from lookahead.backends.transformers.tree_attention.packed_mask import Pages, first_position, sight
from lookahead.backends.transformers.tree_cache import Integers
from lookahead.core.token_tree import Layout


@dataclass
class Step:
    """What a pass is to run.

    Attributes:
        layouts: The trees.
        lengths: Tokens that are kept of each text.
        starts: Place in the text of the first node of each; 0 for an idle tree, which has none.
        shifts: What is added to places in the text to have positions, if anything is.
        dropped: How many of the first tokens layers with a window have forgotten.
    """

    layouts: Sequence[Layout]
    lengths: Sequence[int]
    starts: Sequence[int]
    shifts: Sequence[int] | None = None
    dropped: int = 0

    @property
    def counts(self) -> list[int]:
        """Nodes of each tree."""
        return [len(layout.order) for layout in self.layouts]

    @property
    def nodes_read(self) -> list[Integers]:
        """The nodes of each tree that are read, in the order of their slots."""
        return [layout.order[layout.read_slots] for layout in self.layouts]


@dataclass
class Inputs:
    """What the model takes.

    Attributes:
        tokens, positions: `[rows, nodes]` int64, where the model is.
        keep: Which nodes of each row are read, ascending, `[keep]`.
        rows: Where the reads of each tree are in the logits of all rows, one behind another, of which `keep` were kept;
            `None` if there is nothing else in them.
        arguments: What else: masks, and which logits to keep.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: Integers
    rows: list[Integers] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Padded:
    """Trees beside one another, each padded to the largest; the keys of all lie in columns, nodes behind the longest.

    Args:
        model: What runs.
        masks: What masks it takes; `None` for chains, which are read in their order.
        device: Where inputs go.

    Attributes:
        is_invariant: Whether the bits of a node depend on its own text alone; see `LookaheadConfig.invariant`.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder | None, device: torch.device) -> None:
        self._masks, self._device = masks, device
        self._dtype = model.dtype  # looking takes long
        attention = model.config._attn_implementation
        self.is_invariant = attention in (INVARIANT, BY_POSITION)
        self._packs = attention in PACKED_MASKS or device.type == "cuda"
        self._least_nodes: int = getattr(model, LEAST_NODES, 1)
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        # Places would have to be on the device of the last layer, where hooks do not bring them.
        self._is_spread = hasattr(model, "hf_device_map")

    def inputs(self, step: Step, cache: object = None) -> Inputs:
        """What the model takes of a step; the cache says nothing of it."""
        layouts, counts = step.layouts, step.counts
        rows = len(layouts)
        nodes = max(*counts, -(-self._least_nodes // rows))
        reads = [layout.read_slots for layout in layouts]
        keep = reads[0] if rows == 1 else np.unique(np.concatenate(reads))
        found = self._bring(step, *padded(step, rows, nodes), keep)
        if rows > 1:
            found.rows = [row * len(keep) + np.searchsorted(keep, read_slots) for row, read_slots in enumerate(reads)]
        return found

    def _bring(self, step: Step, tokens: Integers, positions: Integers, placed: Integers, keep: Integers) -> Inputs:
        """All of it where the model is, by one copy."""
        # A number keeps the last ones, without the copy that picking them takes.
        keeps_last = len(keep) > 0 and positions.shape[1] - int(keep[0]) == len(keep)
        picks = self._keeps_logits and not keeps_last and not self._is_spread
        picked = [keep.copy()] if picks else []
        # Plain decoding of one sequence needs no mask of ours: transformers' own fast path applies.
        plain = len(step.layouts) == 1 and step.layouts[0].is_chain and not self.is_invariant
        masks = None if plain else self._masks
        sights = masks.sights(ancestors(step, *positions.shape), step.lengths, positions) if masks else {}
        packed = [of_kind.packed() for of_kind in sights.values()] if self._packs else []
        sent = upload(self._device, tokens, placed, *picked, *packed)
        found = Inputs(sent[0], sent[1], keep)
        if masks and packed:
            keys = max(step.lengths) + positions.shape[1]
            packed_there = sent[len(sent) - len(packed) :]
            found.arguments["attention_mask"] = masks.of_packed(packed_there, keys, self._dtype, step.dropped)
        elif masks:
            found.arguments["attention_mask"] = masks.dense(sights, self._dtype, self._device, step.dropped)
        if picks:
            found.arguments["logits_to_keep"] = sent[2]
        elif self._keeps_logits and keeps_last:
            found.arguments["logits_to_keep"] = len(keep)
        return found


def padded(step: Step, rows: int, nodes: int) -> tuple[Integers, Integers, Integers]:
    """The trees of a step, padded to as many `rows` and `nodes`: tokens, places in the text, and positions, each
    `[rows, nodes]`. Padding is token 0 at position 0."""
    tokens, places = np.zeros((2, rows, nodes), dtype=np.int64)
    counts = step.counts
    for row, (layout, count, start) in enumerate(zip(step.layouts, counts, step.starts, strict=True)):
        tokens[row, :count] = layout.tokens
        places[row, :count] = start + layout.depths
    if step.shifts is None:
        return tokens, places, places
    positions = places.copy()
    for row, (count, shift) in enumerate(zip(counts, step.shifts, strict=True)):
        positions[row, :count] += shift
    return tokens, places, positions


def in_a_row(step: Step) -> tuple[Integers, Integers, list[Integers]]:
    """The trees of a step one behind another: tokens and positions, each `[nodes of all rows]`, and for each tree the
    places of its nodes in the text."""
    tokens = np.concatenate([layout.tokens for layout in step.layouts])
    places = [start + layout.depths for start, layout in zip(step.starts, step.layouts, strict=True)]
    positions = np.concatenate(places)
    if step.shifts is not None:
        positions += np.repeat(step.shifts, step.counts)
    return tokens, positions, places


def ancestors(step: Step, rows: int, nodes: int) -> NDArray[np.bool_]:
    """Which slots each slot of padded trees may attend to, `[rows, nodes, nodes]`."""
    found = np.zeros((rows, nodes, nodes), dtype=np.bool_)
    for row, (layout, count) in enumerate(zip(step.layouts, step.counts, strict=True)):
        found[row, :count, :count] = layout.ancestor_mask()
    return found


@dataclass(frozen=True)
class PackedStep:
    """What the attention function has to know of a step; models hand it through as the argument `packed_rows`.

    Attributes:
        bounds: Where the nodes of each row begin and end.
        masks: For each kind of layer what to add to the scores of each row, `[1, 1, nodes, keys]`, or `None` for
            nodes of which each sees all that is before it. Packed masks in invariant passes.
        kinds: The kind of each layer; one kind stands for all.
        cache: The cache of the step.
        pages: Where the rows lie that share one memory. The masks are one packed mask then, and there are no bounds.
    """

    bounds: Sequence[tuple[int, int]]
    masks: Mapping[str, Any]
    kinds: Sequence[str]
    cache: PackedCache | StaticTreeCache
    pages: Pages | None = None

    def masks_of(self, module: torch.nn.Module) -> Any:
        """The masks of a layer."""
        if len(self.masks) == 1:
            return self.masks[self.kinds[0]]
        layer: Any = module.layer_idx
        return self.masks[self.kinds[layer]]


class Packed:
    """Trees one behind another in one row of tokens, `[1, nodes of all rows]`, without padding.

    Args:
        model: What runs; its attention is `packed_rows_attention`.
        masks: Which kinds of layers it has.
        device: Where inputs go.

    Attributes:
        is_invariant: As above.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder, device: torch.device) -> None:
        self._masks, self._device = masks, device
        self._dtype = model.dtype
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        self.is_invariant = model.config._attn_implementation == INVARIANT_ROWS

    def inputs(self, step: Step, cache: PackedCache) -> Inputs:
        """What the model takes of a step, with the cache that rows are found by."""
        tokens, positions, places = in_a_row(step)
        ends = np.cumsum(step.counts).tolist()
        firsts = [0, *ends[:-1]]
        keep = np.concatenate([first + layout.read_slots for first, layout in zip(firsts, step.layouts, strict=True)])
        sent = upload(self._device, tokens[None], positions[None], keep)
        found = Inputs(sent[0], sent[1], keep)
        masks = {kind: self._masks_of(kind, step, places) for kind in self._masks.kinds}
        bounds = list(zip(firsts, ends, strict=True))
        found.arguments["packed_rows"] = PackedStep(bounds, masks, self._masks.layers, cache)
        if self._keeps_logits:
            alone = len(keep) == 1 == ends[-1]  # a number keeps it without a copy
            found.arguments["logits_to_keep"] = 1 if alone else sent[2]
        return found

    def _masks_of(self, kind: str, step: Step, places: Sequence[Integers]) -> list[torch.Tensor | None]:
        """What layers of a kind add to the scores of each row, see `PackedStep.masks`."""
        masks: list[torch.Tensor | None] = []
        reach = self._masks.reach(kind)
        for length, layout, of_row in zip(step.lengths, step.layouts, places, strict=True):
            if not self.is_invariant and _sees_all_before(length, layout, of_row, reach):
                masks.append(None)
                continue
            seen = sight(layout.ancestor_mask()[None], [length], of_row[None], *reach)
            made = torch.from_numpy(seen.packed()) if self.is_invariant else seen.dense(self._dtype).to(self._device)
            masks.append(made)
        return masks


def _sees_all_before(length: int, layout: Layout, places: Integers, reach: tuple[int | None, int | None]) -> bool:
    """Whether each node sees all that is before it, which no mask has to say of one node, or of a whole text."""
    if len(places) > 1 and (length > 0 or not np.array_equal(layout.ancestor_mask(), np.tri(len(places)))):
        return False
    return not first_position(places, *reach).any()
