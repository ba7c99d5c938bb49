"""Passes of a few fixed sizes over static buffers, which can be compiled and captured in CUDA graphs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, Listed, pack_likeliest, spread, unpack_likeliest
from lookahead.backends.step_clock import step_clock
from lookahead.backends.transfers import Downloads, Read
from lookahead.backends.transformers.graph_recorder import Outputs, Pass, Recorder
from lookahead.backends.transformers.invariant.attention import NAME as INVARIANT
from lookahead.backends.transformers.masks import MaskBuilder, dense
from lookahead.backends.transformers.static_cache import LayerShape, StaticTreeCache
from lookahead.backends.transformers.static_inputs import StaticInputs
from lookahead.backends.transformers.tree_attention.interface import BY_POSITION
from lookahead.backends.transformers.tree_attention.interface import NAME as TREE_ATTENTION
from lookahead.backends.transformers.tree_attention.packed_mask import along_paths
from lookahead.backends.transformers.tree_cache import TreeCache
from lookahead.core.token_tree import Layout

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


class StaticSteps:
    """Runs steps of a model with fixed shapes; serves one batch at a time.

    Holds no reference to the model that would keep it alive.

    Args:
        model: The module that will be passed to `forward`.
        shapes: What its layers keep of a token.
        batch: Rows.
        capacity: Tokens that fit into the cache, the nodes of a step included; for more it grows.
        sizes: Sizes of passes, ascending; larger trees are run elsewhere, unless `most` is given.
        recorder: Records and replays passes.
        compiler: Backend of `torch.compile` that the pass goes through first, "inductor" for one; none if not given.
        most: Nodes of the largest tree, for passes of one size only: these read larger trees part by part, and rows
            are added until they divide `FIXED_ROWS`.

    Attributes:
        cache: Keys and values.
        sizes: As above.
        chunk: Nodes of every pass, if they are of one size only.
        recordings: Passes that were recorded so far, over all sizes.
        last: Tokens that the texts come to at most: where fewer than `PAYS_FROM` of them are left, nothing is recorded
            any more, and steps of sizes that were not are run elsewhere. Any number if `None`.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape | None],
        batch: int,
        capacity: int,
        sizes: Sequence[int],
        recorder: Recorder,
        compiler: str | None = None,
        most: int | None = None,
    ) -> None:
        self._device = model.device
        self._rows = batch if most is None else padded_batch(batch)
        self.cache = StaticTreeCache(shapes, batch, capacity, self._device, self._rows)
        self.sizes = tuple(sizes)
        self.chunk = None if most is None else self.sizes[-1]
        self._most = most
        self.recordings = 0
        self.last: int | None = None
        self._time = step_clock(self._device)
        self._recording_seconds = 0.0
        self._masks = MaskBuilder(model.config)
        self._recorder = recorder
        self._compiler = compiler
        self._inputs: dict[int, StaticInputs] = {}
        self._passes: dict[tuple[int, int], Pass] = {}

    def clock(self) -> float:
        """A clock in seconds that stands still while graphs are recorded, which is no cost of a step."""
        return self._time() - self._recording_seconds

    def begin(self, cache: TreeCache) -> None:
        """Begin with the texts of `cache`, which stays as it is."""
        longest = max(cache.lengths(self.cache.batch))
        if longest > self.cache.capacity:
            self._grow(longest)
        self.cache.adopt(cache)

    def forward(
        self, model: PreTrainedModel, layouts: Sequence[Layout], top_k: int, shifts: Sequence[int]
    ) -> list[ForwardResult] | None:
        """Run one step, if it is of a size that there are passes for.

        Args:
            model: The module that this was made for.
            layouts: The trees, one for each row.
            top_k: How many of the likeliest tokens after each node are wanted, with probabilities.
            shifts: What is added to places in the text to have positions, for each row.

        Returns:
            A result for each row; `None` if the trees are too large, or a pass of that size does not pay any more.
            Then, too, there is room for them in the cache.
        """
        nodes = max(len(layout.order) for layout in layouts)
        size = next((size for size in self.sizes if size >= nodes), self.chunk)
        parts = 1 if size is None else -(-nodes // size)
        needed = self.cache.longest + (nodes if size is None else parts * size)
        if needed > self.cache.capacity:
            self._grow(needed)
        if size is None:
            return None
        if parts > 1 and self._most is not None and nodes > self._most:
            self._most = nodes
            self._inputs.clear()
            self._forget()
        # One that lists more tokens will do, too.
        listing = min((listed for each, listed in self._passes if each == size and listed >= top_k), default=None)
        if listing is None and self.last is not None and self.last - self.cache.longest < PAYS_FROM:
            return None
        key = size, top_k if listing is None else listing
        if size not in self._inputs:
            self._inputs[size] = StaticInputs(self._masks, self._rows, size, self._device, self._most)
        logits, results = self._run(model, layouts, key, shifts, 0)
        if parts > 1:  # what a pass gives, the next one overwrites
            given = [(logits.clone(), results.clone())]
            for part in range(1, parts):
                logits, results = self._run(model, layouts, key, shifts, part)
                given.append((logits.clone(), results.clone()))
            logits, results = (torch.cat(whole, dim=1) for whole in zip(*given, strict=True))
        downloads = Downloads()
        read = downloads.add(results)
        found = []
        for row, layout in enumerate(layouts):
            places = layout.read_slots
            read_nodes = layout.order[places]
            listed = spread(partial(_unpack_row, read, row, top_k), places, read_nodes, len(layout.order))
            rows = dict(zip(read_nodes.tolist(), places.tolist(), strict=True))
            found.append(ForwardResult(logits[row], rows, listed, borrowed=True, downloads=downloads))
        return found

    def _run(
        self,
        model: PreTrainedModel,
        layouts: Sequence[Layout],
        key: tuple[int, int],
        shifts: Sequence[int],
        part: int,
    ) -> Outputs:
        """The pass `key` over a part of the trees; see `run_pass`."""
        inputs = self._inputs[key[0]]
        inputs.stage(layouts, self.cache.lengths(self.cache.batch), shifts, part)
        if key not in self._passes:
            start = self._time()
            self._passes[key] = self._recorder.record(self._pass(model, inputs, key[1]))
            self.recordings += 1
            self._recording_seconds += self._time() - start
        return self._passes[key]()

    def _pass(self, model: PreTrainedModel, inputs: StaticInputs, top_k: int) -> Pass:
        reference, cache, masks = weakref.ref(model), self.cache, self._masks
        run: Callable[..., Outputs] = run_pass
        if self._compiler is not None:
            # Dynamo keeps what it compiled with the code object, no more than a few, so each size has one of its own.
            own = types.FunctionType(run_pass.__code__.replace(), run_pass.__globals__, run_pass.__name__)
            run = torch.compile(own, fullgraph=True, dynamic=False, backend=self._compiler)

        def work() -> Outputs:
            module = reference()
            assert module is not None, "whoever runs a step holds the model"
            cache.columns = inputs.columns.long()
            try:
                return run(module, cache, masks, inputs.tokens, inputs.positions, inputs.packed_masks, top_k)
            finally:
                cache.columns = None

        return work

    def _grow(self, needed: int) -> None:
        """Grow by half at least, since graphs must be captured again."""
        self.cache.grow(rounded(max(needed, self.cache.capacity * 3 // 2)))
        self._forget()

    def _forget(self) -> None:
        self._passes.clear()
        self._recorder.forget()


def run_pass(
    model: PreTrainedModel,
    cache: StaticTreeCache,
    masks: MaskBuilder,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    packed_masks: tuple[torch.Tensor, ...],
    top_k: int,
) -> Outputs:
    """The pass itself: tensors of fixed shapes in, tensors of fixed shapes out, no look at their contents.

    Args:
        model: The model.
        cache: Its cache, `columns` set.
        masks: What masks the model takes.
        tokens: `[batch, nodes]` int32.
        positions: `[batch, nodes]` int32.
        packed_masks: For each kind of layer `[batch, 1, nodes, 3 + words]` int32.
        top_k: How many of the likeliest tokens are wanted.

    Returns:
        Logits `[batch, nodes, vocabulary]`, and what they say in int32, `[batch, nodes, 1 + 2 * top_k]`: the likeliest
        token, the `top_k` likeliest ones, and the bits of their probabilities in float32.
    """
    attention = model.config._attn_implementation
    if attention == BY_POSITION:
        packed_masks = tuple(along_paths(mask) for mask in packed_masks)
    elif attention not in (TREE_ATTENTION, INVARIANT):
        packed_masks = tuple(dense(mask, cache.capacity, model.dtype) for mask in packed_masks)
    logits = model(
        input_ids=tokens.long(),
        position_ids=positions.long(),
        attention_mask=masks.arrange(dict(zip(masks.kinds, packed_masks, strict=True))),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
    ).logits
    return logits, pack_likeliest(logits.flatten(0, 1), top_k).view(*logits.shape[:2], -1)


def _unpack_row(read: Read, row: int, top_k: int) -> Listed:
    found = unpack_likeliest(read()[row])
    return found._replace(ids=found.ids[:, :top_k], probabilities=found.probabilities[:, :top_k])
