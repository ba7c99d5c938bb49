"""Resources of the machine: the clock of steps, free memory, and copies between the host and a device.

All inputs of a step go to the device in one copy, and all results come back in one. Any other copy would make the host
wait for the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from time import get_clock_info, perf_counter, process_time, thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _fine(clock: Callable[[], float], name: Any) -> Callable[[], float]:
    """Return the clock, or the wall clock if its resolution is 10 ms, as on Windows, which claims 100 ns."""
    return clock if get_clock_info(name).resolution <= 1e-5 and sys.platform != "win32" else perf_counter


_thread_clock = _fine(thread_time, "thread_time")
process_clock = _fine(process_time, "process_time")
"""CPU seconds of all threads."""


def step_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock in seconds for steps of a model on `device`.

    On a CPU it is the time of the calling thread, which takes part in all of the work: other processes of a busy
    machine would hide the differences between sizes. Elsewhere it is the wall clock.
    """
    return _thread_clock if device.type == "cpu" else perf_counter


def autocast_here(device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast mode of this thread for `device`, to be entered by another thread."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


class PausingClock:
    """A step clock that pauses while graphs are recorded, as recording is no cost of a step."""

    def __init__(self, device: torch.device) -> None:
        self._time = step_clock(device)
        self._paused = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._time() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock inside of the block."""
        start = self._time()
        try:
            yield
        finally:
            self._paused += self._time() - start


_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


SHARE = 2
"""Divisor of the free memory: keys and values take this fraction without a limit."""


def free_bytes(device: torch.device) -> int:
    """Return the free memory for tensors of `device` in bytes; all memory if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_of_the_system(), *of_the_group(_GROUP)])


def _of_the_system() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.available)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _MemoryStatus(ctypes.Structure):
    """State of the memory on Windows, `MEMORYSTATUSEX`."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("length", "load")),
        *((name, ctypes.c_uint64) for name in ("total", "available", "paged", "paged_left", "own", "own_left", "rest")),
    )


def of_the_group(group: Path) -> list[int]:
    """Return a list with the free bytes of the container, empty without a limit (cgroup 2 or 1)."""
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            return [max(int(limit.read_text()) - int(used.read_text()), 0)]
    return []


_ALIGNMENT = 8
"""Size of the largest number type that is sent, in bytes."""

Read = Callable[[], NDArray[np.int32]]
"""Return the values of a tensor, after its copy to the host."""


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Return the arrays on `device`: on CUDA by one copy without waiting for it, on a CPU in the same memory."""
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    ends = np.cumsum(sizes).tolist()
    staged = torch.empty(max(ends[-1], 1), dtype=torch.uint8, device="cpu", pin_memory=True)
    on_host = staged.numpy()
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        on_host[end - size : end - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # Pinned memory is not given to others until the copy is done.
    there = staged.to(device, non_blocking=True)
    tensors = []
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors.append(there[end - size : end - size + array.nbytes].view(dtype).view(array.shape))
    return tensors


class Staged:
    """Arrays of int32 at fixed places of a device, all updated by one copy.

    Attributes:
        here: Arrays on the host, to be written.
        there: Tensors on the device with the values of the last copy; on a CPU the same memory.
    """

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> None:
        # Each begins at 16 bytes: kernels are compiled for where their arguments lie.
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for shape in shapes]
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False):
            self._host = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
            self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
            parts = zip(torch.split(self._device, sizes), shapes, strict=True)
            self.there = [part[: int(np.prod(shape))].view(shape) for part, shape in parts]
        on_host = zip(np.split(self._host.numpy(), np.cumsum(sizes)[:-1]), shapes, strict=True)
        self.here = [part[: int(np.prod(shape))].reshape(shape) for part, shape in on_host]

    def send(self) -> None:
        """Copy all arrays to the device."""
        if self._device is not self._host:
            # Pinned memory of its own, which is not given to others until the copy is done: nobody waits for that.
            sent = torch.empty_like(self._host, pin_memory=self._device.is_cuda).copy_(self._host)
            self._device.copy_(sent, non_blocking=True)


class Downloads:
    """Small tensors that are copied to the host together, when one of them is first read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, dict[str, NDArray[np.int32]]]] = []

    def add(self, tensor: torch.Tensor) -> Read:
        """Add a tensor of int32, which must not change before the copy; return a function that reads it."""
        if tensor.device.type == "cpu":
            return tensor.numpy
        copy: dict[str, NDArray[np.int32]] = {}
        self._waiting.append((tensor, copy))

        def read() -> NDArray[np.int32]:
            if not copy:
                self._bring()
            return copy["values"]

        return read

    def _bring(self) -> None:
        waiting = self._waiting
        self._waiting = []
        parts = [tensor.reshape(-1) for tensor, _ in waiting]
        values = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
        start = 0
        for tensor, copy in waiting:
            copy["values"] = values[start : start + tensor.numel()].reshape(tensor.shape)
            start += tensor.numel()
