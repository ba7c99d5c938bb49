"""Passes of a few fixed sizes over static buffers, which can be compiled and captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, forward_results
from lookahead.backends.machine import PausingClock, Staged
from lookahead.backends.transformers.graph_recorder import FixedPasses, Outputs
from lookahead.backends.transformers.layouts import Step, ancestors, padded
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import Setting
from lookahead.backends.transformers.rows import LayerShape, StaticTreeCache
from lookahead.backends.transformers.tree_attention.packed_mask import packed_width

SMALLEST_TREE = 8
"""Nodes of the smallest pass for a tree. Fewer would not be faster on a GPU, which
reads all weights for one node as for eight."""


PAYS_FROM = 32
"""Tokens that must be left of a text for a capture. It takes about as long as six steps save (110 ms against 18 ms of
a step, both predicted for 8 billion parameters), and a step adds one to five tokens."""


def pass_sizes(nodes: int) -> tuple[int, ...]:
    """Sizes of passes for trees of up to `nodes` nodes: one node alone, then doubling, so that few must be captured."""
    sizes = [1]
    while sizes[-1] < nodes:
        sizes.append(max(SMALLEST_TREE, 2 * sizes[-1]))
    return tuple(sizes)


def rounded(tokens: int) -> int:
    """Capacity for so many tokens: at most half as much again, so that calls of similar lengths share compiled and
    captured passes. A multiple of 64, as attention with dense masks needs it."""
    power = 1 << max(tokens - 1, 255).bit_length()
    return power * 3 // 4 if tokens <= power * 3 // 4 else power


FIXED_ROWS = 64
"""Rows of every pass of one size only, so that products and means are those of one shape: enough for most drafts, and
few enough to share a tile in most products on a GPU, so that all of them are summed alike."""


def padded_batch(batch: int) -> int:
    """Rows of a batch in passes of one size, those without a text included: they divide `FIXED_ROWS`."""
    return 1 << (batch - 1).bit_length()


class StaticInputs:
    """The inputs of passes of one size.

    Everything that changes from step to step is in one int32 array, so that one copy brings it to the device. On a CPU
    the host's array is the device's. Trees with fewer nodes are padded: a padding node is token 0 at position 0, sees
    itself alone, and is seen by nobody.

    Args:
        masks: Which kinds of layers the model has.
        batch: Rows.
        nodes: Nodes of each row, the padding included.
        device: Where the model is.
        most: Nodes of the largest tree, if that may be more: passes then read it part by part.

    Attributes:
        tokens, positions: `[batch, nodes]` int32.
        columns: Columns of the cache where the nodes go, `[nodes]` int32.
        packed_masks: For each kind of layer `[batch, 1, nodes, 3 + ceil(most / 32)]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, batch: int, nodes: int, device: torch.device, most: int | None = None
    ) -> None:
        passes = -(-(most or nodes) // nodes)
        width = packed_width(passes * nodes)
        shapes = [(batch, nodes), (batch, nodes), (nodes,), *[(batch, 1, nodes, width)] * len(masks.kinds)]
        self._staged = Staged(device, shapes)
        self.nodes = nodes
        self.tokens, self.positions, self.columns = self._staged.there[:3]
        self.packed_masks = tuple(self._staged.there[3:])
        self._masks, self._slots = masks, passes * nodes
        self._tokens, self._positions, self._columns, *self._packed = self._staged.here
        self._offsets = np.arange(nodes, dtype=np.int32)

    def arguments(self, model: PreTrainedModel, cache: StaticTreeCache) -> dict[str, Any]:
        """See `FixedInputs`."""
        return {
            "input_ids": self.tokens.long(),
            "position_ids": self.positions.long(),
            "attention_mask": self._masks.of_packed(self.packed_masks, cache.capacity, model.dtype),
        }

    def stage(self, step: Step, part: int = 0) -> None:
        """Bring one step, or a part of it, to the device.

        Args:
            step: The trees, of at most `nodes` nodes, or `most`. Rows that have none are padding.
            part: Which `nodes` slots of the trees.
        """
        rows, start = len(self._tokens), part * self.nodes
        part_slots = slice(start, start + self.nodes)
        tokens, places, positions = padded(step, rows, self._slots)
        lengths = [*step.lengths, *[0] * (rows - len(step.lengths))]
        np.add(self._offsets, max(lengths) + start, out=self._columns)
        self._tokens[:], self._positions[:] = tokens[:, part_slots], positions[:, part_slots]
        sights = self._masks.sights(ancestors(step, rows, self._slots), lengths, places)
        for buffer, of_kind in zip(self._packed, sights.values(), strict=True):
            buffer[:] = of_kind.packed()[:, :, part_slots]
        self._staged.send()


class StaticSteps:
    """Runs steps of a model with fixed shapes; serves one batch at a time.

    Args:
        model: The model, to which no reference is held.
        shapes: What each layer keeps of a token.
        batch: Texts.
        capacity: Tokens of each text, and nodes of a step, that there is room for at first.
        sizes: Sizes of passes, ascending; larger trees are run elsewhere, unless `most` is given.
        compiler: Backend of `torch.compile` that the pass goes through first, "inductor" for one; none if not given.
        most: Nodes of the largest tree, for passes of one size only: these read larger trees part by part. There are
            so many rows then that they divide `FIXED_ROWS`.

    Attributes:
        sizes: As above.
        cache: Keys and values.
        chunk: Nodes of every pass, if they are of one size only.
        clock: A clock in seconds that stands still while graphs are recorded.
        recorded: What recording took so far.
        last: Tokens that the texts come to at most: where fewer than `PAYS_FROM` of them are left, nothing is recorded
            any more, and steps of sizes that were not are run elsewhere. Any number if `None`.
        made_for: How the model was set when they were made for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape | None],
        batch: int,
        capacity: int,
        sizes: Sequence[int],
        compiler: str | None = None,
        most: int | None = None,
    ) -> None:
        rows = batch if most is None else padded_batch(batch)
        self.cache = StaticTreeCache(shapes, batch, capacity, model.device, rows)
        self.sizes = tuple(sizes)
        self.chunk = None if most is None else self.sizes[-1]
        self._most = most
        self.last: int | None = None
        self.made_for: Setting = ()
        self.clock = PausingClock(model.device)
        self._passes = FixedPasses(model, self.cache, self.clock, compiler=compiler)
        self.recorded = self._passes.recorded
        self._masks, self._device = MaskBuilder(model.config), model.device

    def make_room(self, needed: int) -> None:
        """Have room for so many tokens; grow by half at least, since graphs must be captured again."""
        if needed > self.cache.capacity:
            self.cache.grow(rounded(max(needed, self.cache.capacity * 3 // 2)))
            self._passes.forget()

    def forward(self, step: Step, top_k: int) -> list[ForwardResult] | None:
        """Run one step, if it is of a size that there are passes for.

        Args:
            step: The trees, one for each row.
            top_k: How many of the likeliest tokens after each node are wanted, with probabilities.

        Returns:
            A result for each row; `None` if the trees are too large, or a pass of that size does not pay any more.
            Then, too, there is room for them in the cache.
        """
        nodes = max(step.counts)
        size = next((size for size in self.sizes if size >= nodes), self.chunk)
        parts = 1 if size is None else -(-nodes // size)
        self.make_room(self.cache.longest + (nodes if size is None else parts * size))
        if size is None:
            return None
        if parts > 1 and self._most is not None and nodes > self._most:
            self._most = nodes
            self._passes.forget()
        is_new = self._passes.listing(size, top_k) is None
        if is_new and self.last is not None and self.last - self.cache.longest < PAYS_FROM:
            return None
        logits, listed = self._run(size, parts, step, top_k)
        rows = [row * parts * size + layout.read_slots for row, layout in enumerate(step.layouts)]
        return forward_results(step.counts, step.nodes_read, logits, top_k, rows, borrowed=True, listed=listed)

    def _run(self, size: int, parts: int, step: Step, top_k: int) -> Outputs:
        """Run the trees in parts of `size` nodes; see `run_pass`."""
        given = []
        for part in range(parts):
            self._passes.inputs_of(size, self._new_inputs).stage(step, part)
            outputs = self._passes.run(size, top_k)
            if parts == 1:
                return outputs
            given.append([states.view(self.cache.rows, size, -1).clone() for states in outputs])  # the next overwrites
        logits, listed = (torch.cat(pieces, dim=1).flatten(0, 1) for pieces in zip(*given, strict=True))
        return logits, listed

    def _new_inputs(self, size: int) -> StaticInputs:
        return StaticInputs(self._masks, self.cache.rows, size, self._device, self._most)
