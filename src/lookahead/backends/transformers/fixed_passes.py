"""Passes of a few fixed sizes over memory that stays where it is, which are run again and again: called, or
recorded in CUDA graphs and replayed. `StaticSteps` runs those over the rows of a call; see `pooled_rows` for others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lookahead.backends.base import Recorded
from lookahead.backends.forward_result import PassResult, pack_likeliest, pass_result
from lookahead.backends.machine import PausingClock, Staged, free_bytes
from lookahead.backends.transformers.cache_names import cache_name
from lookahead.backends.transformers.layouts import PassPlan, padded
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import Setting
from lookahead.backends.transformers.rows import LayerShape, StaticTreeCache
from lookahead.core.garbage import uncollected
from lookahead.core.packed_masks import packed_width

SMALLEST_TREE = 8
"""Nodes of the smallest pass for a tree. Fewer would not be faster on a GPU, which reads all weights for one node as
for eight."""

PAYS_FROM = 16
"""Tokens that must be left of a text for a capture. It takes about as long as four steps save (0.1 s against 30 ms of a
step, 8 billion parameters on an H200), and a step adds one to five tokens."""


def pass_sizes(nodes: int) -> tuple[int, ...]:
    """Sizes of passes for trees of up to `nodes` nodes: one node alone, then doubling, so that few must be captured."""
    sizes = [1]
    while sizes[-1] < nodes:
        sizes.append(max(SMALLEST_TREE, 2 * sizes[-1]))
    return tuple(sizes)


def rounded(tokens: int) -> int:
    """Capacity for so many tokens: at most half as much again, so that calls of similar lengths share captured
    passes. A multiple of 64, as attention with dense masks needs it."""
    power = 1 << max(tokens - 1, 255).bit_length()
    return power * 3 // 4 if tokens <= power * 3 // 4 else power


FIXED_ROWS = 64
"""Rows of every pass of one size only, so that products and means are those of one shape: enough for most drafts, and
few enough to share a tile in most products on a GPU, so that all of them are summed alike."""


def padded_batch(batch: int) -> int:
    """Rows of a batch in passes of one size, those without a text included: they divide `FIXED_ROWS`."""
    return 1 << (batch - 1).bit_length()


Outputs = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[], Outputs]
"""Work on tensors that stay where they are, and the tensors it leaves its results in."""


def run_pass(model: PreTrainedModel, cache: StaticTreeCache, inputs: Any, top_k: int) -> Outputs:
    """The pass itself: tensors of fixed shapes in, tensors of fixed shapes out, no look at their contents.

    Args:
        model, cache: The model and its cache, `columns` set.
        inputs: What it takes: `StaticInputs`, or others that have `columns` and `arguments` like these.
        top_k: How many of the likeliest tokens are wanted.

    Returns:
        Logits `[rows * nodes, vocabulary]`, and what they say; see `pack_likeliest`.
    """
    arguments = inputs.arguments(model, cache)
    logits = model(**arguments, **{cache_name(model): cache}, use_cache=True, return_dict=True).logits.flatten(0, 1)
    return logits, pack_likeliest(logits, top_k)


class FixedPasses:
    """Passes of some sizes, each recorded when it is first run, where that pays.

    There is one of each number of nodes; if it lists too few of the likeliest tokens after each of them, one that lists
    more takes its place. No reference is held to the model.

    Args:
        model, cache: The model and its cache.
        clock: Stands still while passes are recorded.
        lists: How many tokens passes list at least.

    Attributes:
        inputs: Those of each size so far.
        recorded: What it took so far.
    """

    def __init__(self, model: PreTrainedModel, cache: StaticTreeCache, clock: PausingClock, lists: int = 0) -> None:
        self._model = weakref.ref(model)
        self._device = model.device
        self._cache = cache
        self._clock = clock
        self._lists = lists
        self.recorded = Recorded()
        self._setting: object = self
        self.serve(None)

    def serve(self, setting: object) -> None:
        """Be of a setting, such as memory of some size: what was recorded in another one is forgotten."""
        if setting != self._setting:
            self._setting = setting
            self._passes: dict[int, tuple[int, Pass]] = {}  # with how many tokens each lists
            self.inputs: dict[int, Any] = {}
            self._recorder = recorder_for(self._device)

    def has(self, size: int, top_k: int) -> bool:
        """Whether a pass of so many nodes was recorded that lists at least `top_k` tokens."""
        return size in self._passes and self._passes[size][0] >= top_k

    def run(self, size: int, top_k: int, make: Callable[[int], Any], *contents: Any) -> Outputs:
        """Run a pass of so many nodes that lists at least `top_k` tokens; see `run_pass`.

        Args:
            make: Makes the inputs of passes of this size, where there are none.
            *contents: What is staged in them.
        """
        if size not in self.inputs:
            self.inputs[size] = make(size)
        self.inputs[size].stage(*contents)
        if not self.has(size, top_k):
            start = perf_counter()
            free = self._free
            lists = max(top_k, self._lists)
            with self._clock.paused():
                work = self._work(self.inputs[size], lists)
                self._passes[size] = lists, work if self._recorder is None else self._recorder(work)
            self.recorded.count += 1
            self.recorded.seconds += perf_counter() - start
            self.recorded.bytes += max(free - self._free, 0)
        return self._passes[size][1]()

    def _work(self, inputs: Any, top_k: int) -> Pass:
        reference = self._model
        cache = self._cache

        def work() -> Outputs:
            model = reference()
            assert model is not None, "whoever runs a step holds the model"
            with cache.written_at(inputs.columns.long()):
                return run_pass(model, cache, inputs, top_k)

        return work

    @property
    def _free(self) -> int:
        return free_bytes(self._device) if self._device.type == "cuda" else 0


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
        self._masks = masks
        self._slots = passes * nodes
        self._tokens, self._positions, self._columns, *self._packed = self._staged.here
        self._offsets = np.arange(nodes, dtype=np.int32)

    def arguments(self, model: PreTrainedModel, cache: StaticTreeCache) -> dict[str, Any]:
        """What the model takes, beside its cache."""
        return {
            "input_ids": self.tokens.long(),
            "position_ids": self.positions.long(),
            "attention_mask": self._masks.of_packed(self.packed_masks, cache.capacity, model.dtype),
        }

    def stage(self, plan: PassPlan, part: int = 0) -> None:
        """Bring one pass, or a part of it, to the device.

        Args:
            plan: The trees, of at most `nodes` nodes, or `most`. Rows that have none are padding.
            part: Which `nodes` slots of the trees.
        """
        rows = len(self._tokens)
        start = part * self.nodes
        part_slots = slice(start, start + self.nodes)
        tokens, places, positions = padded(plan, rows, self._slots)
        lengths = np.zeros(rows, dtype=np.int64)
        lengths[: len(plan.lengths)] = plan.lengths
        np.add(self._offsets, int(lengths.max()) + start, out=self._columns)
        self._tokens[:], self._positions[:] = tokens[:, part_slots], positions[:, part_slots]
        sights = self._masks.sights(plan.forest.ancestors(rows, self._slots), lengths, places)
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
        most: Nodes of the largest tree, for passes of one size only: these read larger trees part by part. There are
            so many rows then that they divide `FIXED_ROWS`.

    Attributes:
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
        self._passes = FixedPasses(model, self.cache, self.clock)
        self.recorded = self._passes.recorded
        self._masks = MaskBuilder(model.config)
        self._device = model.device

    def make_room(self, needed: int) -> None:
        """Have room for so many tokens; grow by half at least, since graphs must be captured again."""
        if needed > self.cache.capacity:
            self.cache.grow(rounded(max(needed, self.cache.capacity * 3 // 2)))

    def forward(self, plan: PassPlan, top_k: int) -> PassResult | None:
        """Run one pass, if it is of a size that there are passes for.

        Args:
            plan: The trees, one for each row.
            top_k: Number of likeliest tokens to list after each node, with probabilities.

        Returns:
            The result; `None` if the trees are too large, or a pass of that size does not pay any more. Then, too,
            there is room for them in the cache.
        """
        nodes = int(plan.counts.max())
        size = next((size for size in self.sizes if size >= nodes), self.chunk)
        parts = 1 if size is None else -(-nodes // size)
        self.make_room(self.cache.longest + (nodes if size is None else parts * size))
        if size is None:
            return None
        if parts > 1 and self._most is not None:
            self._most = max(self._most, nodes)
        self._passes.serve((self.cache.capacity, self._most))
        left = PAYS_FROM if self.last is None else self.last - self.cache.longest
        if left < PAYS_FROM and not self._passes.has(size, top_k):
            return None
        logits, listed = self._run(size, parts, plan, top_k)
        forest = plan.forest
        row_of = forest.rows_of_slots[forest.read_slots]
        rows = row_of * parts * size + forest.read_slots - forest.firsts[row_of]
        return pass_result(forest, logits, top_k, rows, borrowed=True, listed=listed)

    def _run(self, size: int, parts: int, plan: PassPlan, top_k: int) -> Outputs:
        """Run the trees in parts of `size` nodes; see `run_pass`."""
        given = []
        for part in range(parts):
            outputs = self._passes.run(size, top_k, self._new_inputs, plan, part)
            if parts == 1:
                return outputs
            given.append([states.view(self.cache.rows, size, -1).clone() for states in outputs])  # the next overwrites
        logits, listed = (torch.cat(pieces, dim=1).flatten(0, 1) for pieces in zip(*given, strict=True))
        return logits, listed

    def _new_inputs(self, size: int) -> StaticInputs:
        return StaticInputs(self._masks, self.cache.rows, size, self._device, self._most)


def recorder_for(device: torch.device) -> Callable[[Pass], Pass] | None:
    """What records passes, where that pays: on a CPU there are no launches to save.

    All graphs share one pool of memory, as only one of them runs at a time; it goes with them.
    """
    return partial(record, device, torch.cuda.graph_pool_handle(), []) if device.type == "cuda" else None


def record(device: torch.device, pool: Any, recorded: list[bool], work: Pass) -> Pass:
    """Warm up, capture a CUDA graph, and return the replay: one launch for any number of kernels, whose results are in
    the same tensors every time. Whether a pass waits is asked of the first one that is `recorded`: it takes long.

    Raises:
        RuntimeError: The pass cannot be captured, for example because it waits for the device.
    """
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels, chooses algorithms, takes work space
            if not recorded:
                with _RefuseWaiting():  # type: ignore[no-untyped-call]
                    work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A graph in the garbage would break the capture off as it goes.
        with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = work()
        torch.cuda.synchronize(device)  # or the next step would wait for the warm-up
    recorded.append(True)

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class _RefuseWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What waits for the device cannot be captured. It is better found out before: a capture that breaks off may leave
    the device's random numbers in a state in which nobody can draw. Other threads may wait as they like."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(operation, args, kwargs):
            raise RuntimeError(f"{operation} waits for the device")
        return operation(*args, **kwargs)


_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _waits(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host must know values that are on a device, or copies from one to the other and waits for it."""
    tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
    kinds = {tensor.device.type for tensor in tensors}
    if operation in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        target = kwargs.get("device")
        kinds |= set() if target is None else {torch.device(target).type}
        return len(kinds) > 1 and not kwargs.get("non_blocking", False)
    if kinds <= {"cpu"}:
        return False
    if operation is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_VALUES_DECIDE & set(operation.tags))
