"""Passes of fixed sizes, which are run again and again: called, or recorded once and replayed."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lookahead.backends.base import Recorded
from lookahead.backends.forward_result import pack_likeliest
from lookahead.backends.machine import PausingClock, free_bytes
from lookahead.backends.transformers.rows import StaticTreeCache

Outputs = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[], Outputs]
"""Work on tensors that stay where they are, and the tensors it leaves its results in."""


class CudaGraphRecorder:
    """Records each pass in a CUDA graph: a replay is one launch for any number of kernels.

    All graphs share one pool of memory, as only one of them runs at a time; it goes with them.

    Args:
        device: The CUDA device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Pass) -> Pass:
        """Warm up, capture, and return the replay; its results are in the same tensors every time.

        Raises:
            RuntimeError: The pass cannot be captured, for example because it waits for the device.
        """
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                work()  # compiles kernels, chooses algorithms, takes work space
                with _RefuseWaiting():  # type: ignore[no-untyped-call]
                    work()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = work()
            torch.cuda.synchronize(self._device)  # or the next step would wait for the warm-up

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


def recorder_for(device: torch.device) -> CudaGraphRecorder | None:
    """What pays on `device`: on a CPU there are no launches to save."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None


class FixedInputs(Protocol):
    """The inputs of passes of one size, in memory that stays where it is.

    Attributes:
        nodes: Nodes of each row of a pass.
        columns: Columns of the cache where they go, `[nodes]` int32.
    """

    nodes: int
    columns: torch.Tensor

    def arguments(self, model: PreTrainedModel, cache: StaticTreeCache) -> dict[str, Any]:
        """What the model takes, beside its cache."""


def run_pass(model: PreTrainedModel, cache: StaticTreeCache, inputs: FixedInputs, top_k: int) -> Outputs:
    """The pass itself: tensors of fixed shapes in, tensors of fixed shapes out, no look at their contents.

    Args:
        model: The model.
        cache: Its cache, `columns` set.
        inputs: What it takes.
        top_k: How many of the likeliest tokens are wanted.

    Returns:
        Logits `[rows * nodes, vocabulary]`, and what they say; see `pack_likeliest`.
    """
    arguments = inputs.arguments(model, cache)
    logits = model(**arguments, past_key_values=cache, use_cache=True, return_dict=True).logits.flatten(0, 1)
    return logits, pack_likeliest(logits, top_k)


class FixedPasses:
    """Passes of some sizes, each recorded when it is first run, where that pays.

    A pass is known by how many nodes it has, and how many of the likeliest tokens after each it lists. No reference is
    held to the model.

    Args:
        model: The model.
        cache: Its cache.
        clock: Stands still while passes are recorded.
        lists: How many tokens passes list at least.
        compiler: Backend of `torch.compile` that passes go through first; none if not given.

    Attributes:
        inputs: Those of each size so far.
        recorded: What it took so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticTreeCache,
        clock: PausingClock,
        lists: int = 0,
        compiler: str | None = None,
    ) -> None:
        self._model, self._device = weakref.ref(model), model.device
        self._cache, self._clock, self._lists, self._compiler = cache, clock, lists, compiler
        self.recorded = Recorded()
        self.forget()

    def forget(self) -> None:
        """Run nothing again that was recorded: its memory is another one's now."""
        self._passes: dict[tuple[int, int], Pass] = {}
        self.inputs: dict[int, Any] = {}
        self._recorder = recorder_for(self._device)

    def inputs_of(self, size: int, make: Callable[[int], Any]) -> Any:
        """The inputs of passes of so many nodes, which `make` makes where there are none."""
        if size not in self.inputs:
            self.inputs[size] = make(size)
        return self.inputs[size]

    def listing(self, size: int, top_k: int) -> int | None:
        """How many tokens a recorded pass of so many nodes lists, `top_k` or more; `None` if there is none."""
        return min((listed for nodes, listed in self._passes if nodes == size and listed >= top_k), default=None)

    def run(self, size: int, top_k: int) -> Outputs:
        """Run a pass of so many nodes over what is staged, which lists at least `top_k` tokens; see `run_pass`."""
        listing = self.listing(size, top_k)
        key = size, max(top_k, self._lists) if listing is None else listing
        if key not in self._passes:
            start, free = perf_counter(), self._free
            with self._clock.paused():
                work = self._work(self.inputs[size], key[1])
                self._passes[key] = work if self._recorder is None else self._recorder.record(work)
            self.recorded.count += 1
            self.recorded.seconds += perf_counter() - start
            self.recorded.bytes += max(free - self._free, 0)
        return self._passes[key]()

    def _work(self, inputs: FixedInputs, top_k: int) -> Pass:
        run: Callable[..., Outputs] = run_pass
        if self._compiler is not None:
            # Dynamo keeps what it compiled with the code object, no more than a few, so each size has one of its own.
            function = types.FunctionType(run_pass.__code__.replace(), run_pass.__globals__, run_pass.__name__)
            run = torch.compile(function, fullgraph=True, dynamic=False, backend=self._compiler)
        reference, cache = self._model, self._cache

        def work() -> Outputs:
            model = reference()
            assert model is not None, "whoever runs a step holds the model"
            with cache.written_at(inputs.columns.long()):
                return run(model, cache, inputs, top_k)

        return work

    @property
    def _free(self) -> int:
        return free_bytes(self._device) if self._device.type == "cuda" else 0


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
