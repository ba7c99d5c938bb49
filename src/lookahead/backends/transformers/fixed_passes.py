"""Passes of a few fixed sizes over memory with fixed addresses, called or recorded in CUDA graphs and replayed.

`StaticSteps` runs them for the rows of a call, and `pooled_rows` for an engine.
"""

from __future__ import annotations

import warnings
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
from lookahead.backends.transformers.layouts import PassPlan, padded, padded_trees
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import Setting
from lookahead.backends.transformers.rows import LayerShape, StaticTreeCache
from lookahead.core.compiled import uncollected
from lookahead.core.tree_masks import packed_width
from lookahead.errors import LookaheadWarning

SMALLEST_TREE = 8
"""Nodes of the smallest pass for a tree. On a GPU fewer nodes are not faster."""

PAYS_FROM = 16
"""Smallest number of remaining tokens for a capture, which costs the saved time of about four steps."""


def pass_sizes(nodes: int) -> tuple[int, ...]:
    """Return the sizes of passes for trees of up to `nodes` nodes: 1, 8, then doubled."""
    sizes = [1]
    while sizes[-1] < nodes:
        sizes.append(max(SMALLEST_TREE, 2 * sizes[-1]))
    return tuple(sizes)


def rounded(tokens: int) -> int:
    """Return the capacity for a number of tokens: at most 50 % more, so that similar calls share captures.

    It is a multiple of 64, as attention with dense masks needs.
    """
    power = 1 << max(tokens - 1, 255).bit_length()
    return power * 3 // 4 if tokens <= power * 3 // 4 else power


FIXED_ROWS = 64
"""Nodes of every invariant static pass: enough for most drafts, few enough for one tile of most GPU products."""


def padded_batch(batch: int) -> int:
    """Return the number of rows of a batch in passes of one size, padding included: a divisor of `FIXED_ROWS`."""
    return 1 << (batch - 1).bit_length()


Outputs = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[], Outputs]
"""Function that computes on tensors with fixed addresses, and returns its result tensors."""


def run_pass(model: PreTrainedModel, cache: StaticTreeCache, inputs: Any, top_k: int) -> Outputs:
    """Run a pass with fixed shapes, without reading contents of tensors.

    Args:
        model: The model.
        cache: Its cache, with `columns` set.
        inputs: `StaticInputs`, or another object with `columns` and `arguments`.
        top_k: Number of likeliest tokens to list.

    Returns:
        Logits `[rows * nodes, vocabulary]`, and the result of `pack_likeliest`.
    """
    arguments = inputs.arguments(model, cache)
    logits = model(**arguments, **{cache_name(model): cache}, use_cache=True, return_dict=True).logits.flatten(0, 1)
    return logits, pack_likeliest(logits, top_k)


class FixedPasses:
    """Passes of fixed sizes, each recorded on first use if the device benefits.

    There is one pass for each number of nodes. A pass with more listed tokens replaces one with too few. It has no
    reference to the model.

    Args:
        model: The model.
        cache: Its cache.
        clock: Clock that is paused during recording.
        lists: Smallest number of likeliest tokens that passes list.
        is_trial: Whether a recording that fails raises. Otherwise its pass runs unrecorded, with a warning.

    Attributes:
        inputs: Inputs of each size so far.
        recorded: Number, time and memory of recorded passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticTreeCache,
        clock: PausingClock,
        lists: int = 0,
        is_trial: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._device = model.device
        self._cache = cache
        self._clock = clock
        self._lists = lists
        self._is_trial = is_trial
        self.recorded = Recorded()
        self._setting: object = self
        self.serve(None)

    def serve(self, setting: object) -> None:
        """Switch to a setting, for example a size of memory; passes of another setting are dropped."""
        if setting != self._setting:
            self._setting = setting
            self._passes: dict[int, tuple[int, Pass]] = {}  # number of listed tokens, and the pass
            self.inputs: dict[int, Any] = {}
            self._recorder = recorder_for(self._device)

    def has(self, size: int, top_k: int) -> bool:
        """Return whether there is a pass of `size` nodes that lists at least `top_k` tokens."""
        return size in self._passes and self._passes[size][0] >= top_k

    def run(self, size: int, top_k: int, make: Callable[[int], Any], *contents: Any) -> Outputs:
        """Run a pass of `size` nodes that lists at least `top_k` tokens; see `run_pass`.

        Args:
            size: Number of nodes.
            top_k: Smallest number of listed tokens.
            make: Makes the inputs for a new size.
            *contents: Arguments of their method `stage`.
        """
        if size not in self.inputs:
            self.inputs[size] = make(size)
        self.inputs[size].stage(*contents)
        if not self.has(size, top_k):
            start = perf_counter()
            free = self._free
            lists = max(top_k, self._lists)
            with self._clock.paused():
                self._passes[size] = lists, self._record(self._work(self.inputs[size], lists), size)
            self.recorded.count += 1
            self.recorded.seconds += perf_counter() - start
            self.recorded.bytes += max(free - self._free, 0)
        return self._passes[size][1]()

    def _record(self, work: Pass, size: int) -> Pass:
        """Record a pass if the device benefits; after a failure all further passes of this setting run unrecorded."""
        if self._recorder is None:
            return work
        try:
            return self._recorder(work)
        except RuntimeError as error:
            if self._is_trial:
                raise
            self._recorder = None
            warnings.warn(
                f"steps of {size} nodes run one kernel at a time: their CUDA graph cannot be captured ({error}). With "
                "smaller kv_bytes, max_rows or step_budget there is more memory for graphs",
                LookaheadWarning,
                stacklevel=2,
            )
            return work

    def _work(self, inputs: Any, top_k: int) -> Pass:
        reference = self._model
        cache = self._cache

        def work() -> Outputs:
            model = reference()
            assert model is not None, "the caller of a step has a reference to the model"
            with cache.written_at(inputs.columns.long()):
                return run_pass(model, cache, inputs, top_k)

        return work

    @property
    def _free(self) -> int:
        return free_bytes(self._device) if self._device.type == "cuda" else 0


class StaticInputs:
    """Inputs of passes of one size.

    All variable values are in one int32 array, so that one copy uploads them. On a CPU host and device share it.
    Smaller trees are padded: a padding node is token 0 at position 0, sees only itself, and is visible to no other
    node.

    Args:
        masks: Masks of the model.
        batch: Number of rows.
        nodes: Nodes of each row, padding included.
        device: Device of the model.
        max_nodes: Nodes of the largest tree, if larger: several passes process it in parts.

    Attributes:
        tokens: `[batch, nodes]` int32.
        positions: `[batch, nodes]` int32.
        columns: Columns of the nodes in the cache, `[nodes]` int32.
        packed_masks: For each kind of layer `[batch, 1, nodes, 3 + ceil(max_nodes / 32)]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, batch: int, nodes: int, device: torch.device, max_nodes: int | None = None
    ) -> None:
        passes = -(-(max_nodes or nodes) // nodes)
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
        """Return the arguments of the model beside its cache."""
        return {
            "input_ids": self.tokens.long(),
            "position_ids": self.positions.long(),
            "attention_mask": self._masks.of_packed(self.packed_masks, cache.capacity, model.dtype),
        }

    def stage(self, plan: PassPlan, part: int = 0) -> None:
        """Upload the inputs of a pass.

        Args:
            plan: Trees of at most `nodes` nodes, or `max_nodes`. Missing rows are padded.
            part: Number of the part of `nodes` slots.
        """
        rows = len(self._tokens)
        start = part * self.nodes
        part_slots = slice(start, start + self.nodes)
        tokens, places, positions = padded(plan, rows, self._slots)
        lengths = np.zeros(rows, dtype=np.int64)
        lengths[: len(plan.lengths)] = plan.lengths
        np.add(self._offsets, int(lengths.max()) + start, out=self._columns)
        self._tokens[:], self._positions[:] = tokens[:, part_slots], positions[:, part_slots]
        masks = self._masks.packed(padded_trees(plan.forest, lengths, places))
        for buffer, mask in zip(self._packed, masks, strict=True):
            buffer[:] = mask[:, :, part_slots]
        self._staged.send()


class StaticSteps:
    """Steps of a model with fixed shapes, for one batch at a time.

    Args:
        model: The model; no reference is kept.
        shapes: Shape of each layer's keys and values.
        batch: Number of texts.
        capacity: Initial capacity for tokens of each text and nodes of a step.
        sizes: Sizes of passes, ascending; the caller runs larger trees itself, unless there is `max_nodes`.
        max_nodes: Nodes of the largest tree, for passes of a single size, which process larger trees in parts. The
            number of rows is then a divisor of `FIXED_ROWS`.
        is_trial: See `FixedPasses`.

    Attributes:
        cache: Keys and values.
        chunk: Nodes of every pass, if there is a single size.
        clock: Clock in seconds that is paused during recording.
        recorded: Number, time and memory of recorded passes.
        last: Largest number of tokens of the texts; unlimited if `None`. With fewer than `PAYS_FROM` remaining, no pass
            is recorded.
        made_for: Setting of the model at creation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape | None],
        batch: int,
        capacity: int,
        sizes: Sequence[int],
        max_nodes: int | None = None,
        is_trial: bool = False,
    ) -> None:
        rows = batch if max_nodes is None else padded_batch(batch)
        self.cache = StaticTreeCache(shapes, batch, capacity, model.device, rows)
        self.sizes = tuple(sizes)
        self.chunk = None if max_nodes is None else self.sizes[-1]
        self._max_nodes = max_nodes
        self.last: int | None = None
        self.made_for: Setting = ()
        self.clock = PausingClock(model.device)
        self._passes = FixedPasses(model, self.cache, self.clock, is_trial=is_trial)
        self.recorded = self._passes.recorded
        self._masks = MaskBuilder(model.config)
        self._device = model.device

    def make_room(self, needed: int) -> None:
        """Grow the cache to at least `needed` tokens, by at least half, since graphs must be captured again."""
        if needed > self.cache.capacity:
            self.cache.grow(rounded(max(needed, self.cache.capacity * 3 // 2)))

    def forward(self, plan: PassPlan, top_k: int) -> PassResult | None:
        """Run one pass, if there is one for its size.

        Args:
            plan: The trees, one for each row.
            top_k: Number of likeliest tokens to list after each node, with probabilities.

        Returns:
            The result; `None` if the trees are too large, or a recording would not pay. The cache has capacity for them
            in any case.
        """
        nodes = int(plan.forest.counts.max())
        size = next((size for size in self.sizes if size >= nodes), self.chunk)
        parts = 1 if size is None else -(-nodes // size)
        self.make_room(self.cache.longest + (nodes if size is None else parts * size))
        if size is None:
            return None
        if parts > 1 and self._max_nodes is not None:
            self._max_nodes = max(self._max_nodes, nodes)
        self._passes.serve((self.cache.moves, self._max_nodes))
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
        results = []
        for part in range(parts):
            outputs = self._passes.run(size, top_k, self._new_inputs, plan, part)
            if parts == 1:
                return outputs
            results.append([states.view(self.cache.rows, size, -1).clone() for states in outputs])  # before overwriting
        logits, listed = (torch.cat(pieces, dim=1).flatten(0, 1) for pieces in zip(*results, strict=True))
        return logits, listed

    def _new_inputs(self, size: int) -> StaticInputs:
        return StaticInputs(self._masks, self.cache.rows, size, self._device, self._max_nodes)


def recorder_for(device: torch.device) -> Callable[[Pass], Pass] | None:
    """Return a function that records passes; `None` on a CPU, which has no launches to save.

    All graphs share one pool of memory, because only one of them runs at a time.
    """
    return partial(record, device, torch.cuda.graph_pool_handle(), []) if device.type == "cuda" else None


def record(device: torch.device, pool: Any, recorded: list[bool], work: Pass) -> Pass:
    """Warm up, capture a CUDA graph, and return its replay, which writes its results to the same tensors every time.

    Only the first recording checks for operations that wait for the device, because the check is slow.

    Raises:
        RuntimeError: The pass cannot be captured, for example because it waits for the device.
    """
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels, chooses algorithms, allocates work space
            if not recorded:
                with _RefuseWaiting():  # type: ignore[no-untyped-call]
                    work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Freeing an old graph would abort the capture.
        with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = work()
        torch.cuda.synchronize(device)  # or the next step would wait for the warm-up
    recorded.append(True)

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class _RefuseWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait for the device, before a capture: an aborted one may break the random generator.

    Other threads may wait.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(operation, args, kwargs):
            raise RuntimeError(f"{operation} waits for the device")
        return operation(*args, **kwargs)


_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _waits(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation needs values of a device on the host, or copies between them synchronously."""
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
