"""Passes of a few fixed sizes over memory with fixed addresses, called or recorded in CUDA graphs and replayed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lookahead.backends.base import Recorded
from lookahead.backends.forward_result import pack_likeliest
from lookahead.backends.machine import PausingClock, free_bytes
from lookahead.backends.transformers.cache_names import cache_name
from lookahead.backends.transformers.model_state import Setting
from lookahead.backends.transformers.row_pool import RowPool
from lookahead.core.compiled import uncollected
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

Outputs = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[], Outputs]
"""Function that computes on tensors with fixed addresses, and returns its result tensors."""


class FixedPasses:
    """Passes of fixed sizes, each recorded on first use if the device benefits. They read no contents of tensors.

    There is one pass for each number of nodes. A pass with more listed tokens replaces one with too few. It has no
    reference to the model.

    Args:
        model: The model.
        cache: Its cache.
        clock: Clock that is paused during recording.
        lists: Smallest number of likeliest tokens that passes list.
        is_trial: Whether a recording that fails raises. Otherwise its pass runs unrecorded, with a warning.

    Attributes:
        cache: The argument `cache`.
        clock: The argument `clock`.
        inputs: Inputs of each size so far.
        recorded: Number, time and memory of recorded passes.
        sizes: Largest numbers of texts of a pass, of pages of a text, and of nodes of a tree in parts.
        made_for: Setting of the model at creation.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RowPool, clock: PausingClock, lists: int = 0, is_trial: bool = False
    ) -> None:
        self._model = weakref.ref(model)
        self.cache = cache
        self.clock = clock
        self._lists = lists
        self._is_trial = is_trial
        self.recorded = Recorded()
        self.sizes = 0, 0, 0
        self.made_for: Setting = ()
        self._setting: object = self
        self.serve(None)

    def serve(self, setting: object) -> None:
        """Switch to a setting, for example a size of memory; passes of another setting are dropped."""
        if setting != self._setting:
            self._setting = setting
            self._passes: dict[int, tuple[int, Pass]] = {}  # number of listed tokens, and the pass
            self.inputs: dict[int, Any] = {}
            self._recorder = recorder_for(self.cache.device)

    def has(self, size: int, top_k: int) -> bool:
        """Return whether there is a pass of `size` nodes that lists at least `top_k` tokens."""
        return size in self._passes and self._passes[size][0] >= top_k

    def run(self, size: int, top_k: int, make: Callable[[int], Any], *contents: Any) -> Outputs:
        """Run a pass of `size` nodes that lists at least `top_k` tokens.

        Args:
            size: Number of nodes.
            top_k: Smallest number of listed tokens.
            make: Makes the inputs for a new size.
            *contents: Arguments of their method `stage`.

        Returns:
            Logits `[nodes, vocabulary]`, and the result of `pack_likeliest`.
        """
        if size not in self.inputs:
            self.inputs[size] = make(size)
        self.inputs[size].stage(*contents)
        if not self.has(size, top_k):
            start = perf_counter()
            free = self._free
            lists = max(top_k, self._lists)
            with self.clock.paused():
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
        cache = self.cache

        def work() -> Outputs:
            model = reference()
            assert model is not None, "the caller of a step has a reference to the model"
            with cache.written_at(inputs.columns.long()):
                arguments = inputs.arguments(model, cache) | {cache_name(model): cache}
                logits = model(**arguments, use_cache=True, return_dict=True).logits.flatten(0, 1)
            return logits, pack_likeliest(logits, top_k)

        return work

    @property
    def _free(self) -> int:
        return free_bytes(self.cache.device) if self.cache.device.type == "cuda" else 0


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
