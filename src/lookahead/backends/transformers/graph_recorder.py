"""How a pass of a fixed size is run again and again: called, or recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[], Outputs]
"""Work on tensors that stay where they are, and the tensors it leaves its results in."""


class Recorder(Protocol):
    """Turns a pass into one that may be cheaper to run."""

    def record(self, work: Pass) -> Pass:
        """A pass that does what `work` does with what lies in its tensors then; `work` may be called meanwhile."""


class NoRecorder:
    """Passes are called as they are: on a CPU there are no launches to save."""

    def record(self, work: Pass) -> Pass:
        """`work` itself."""
        return work


class CudaGraphRecorder:
    """Records each pass in a CUDA graph: a replay is one launch for any number of kernels.

    All graphs share one pool of memory, as only one of them runs at a time.

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
                with _waiting_is_an_error():
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


def recorder_for(device: torch.device) -> Recorder:
    """What pays on `device`."""
    return CudaGraphRecorder(device) if device.type == "cuda" else NoRecorder()


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """What waits for the device cannot be captured. It is better found out here: a capture that breaks off may
    leave the device's random numbers in a state in which nobody can draw."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
