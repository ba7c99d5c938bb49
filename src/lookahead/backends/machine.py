"""What there is of a machine: the clock that steps are timed by, memory for keys and values, and copies between the
host and a device.

What a step brings to a device goes in one copy, and what it gives comes back in one. Each copy that is not asked for in
this way makes the host wait until the device has done all that it was given.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import get_clock_info, perf_counter, process_time, thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _fine(clock: Callable[[], float], name: Any) -> Callable[[], float]:
    """The clock, or the wall clock if it ticks in hundredths of a second. On Windows it does, but claims 100 ns."""
    return clock if get_clock_info(name).resolution <= 1e-5 and sys.platform != "win32" else perf_counter


_thread_clock = _fine(thread_time, "thread_time")
process_clock = _fine(process_time, "process_time")
"""CPU seconds of all threads."""


def step_clock(device: torch.device) -> Callable[[], float]:
    """Seconds from any moment on, for a model on `device`.

    On a CPU the time of the calling thread, which takes part in all of the work and waits for nothing else: what other
    processes take of a busy machine would hide the differences between sizes. Elsewhere it is the wall clock.
    """
    return _thread_clock if device.type == "cpu" else perf_counter


class PausingClock:
    """A step clock that stands still while graphs are recorded, which is no cost of a step."""

    def __init__(self, device: torch.device) -> None:
        self._time = step_clock(device)
        self._paused = 0.0

    def __call__(self) -> float:
        """The time in seconds."""
        return self._time() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still while it lasts."""
        start = self._time()
        try:
            yield
        finally:
            self._paused += self._time() - start


_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken where `device` keeps its tensors; those of all memory where nothing tells."""
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
    """Bytes that a container leaves, in a list of one, or of none where it has no limit (cgroup 2, or 1)."""
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            return [max(int(limit.read_text()) - int(used.read_text()), 0)]
    return []


_ALIGNMENT = 8
"""Bytes of the largest number that is sent."""

Read = Callable[[], NDArray[np.int32]]
"""Gives what a tensor holds, once it has come to the host."""


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """The arrays on `device`: on CUDA by one copy, for which the host does not wait; on a CPU in the same memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    ends = np.cumsum(sizes).tolist()
    staged = torch.empty(max(ends[-1], 1), dtype=torch.uint8, pin_memory=True)
    on_host = staged.numpy()
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        on_host[end - size : end - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # Pinned memory is not given to others until the copy is done.
    there = staged.to(device, non_blocking=True)
    found = []
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        found.append(there[end - size : end - size + array.nbytes].view(dtype).view(array.shape))
    return found


class Staged:
    """Arrays of int32 that stay where they are on a device, and come there again and again, all by one copy.

    Attributes:
        here: To be written to.
        there: What they held when they were last sent, on a CPU the same memory.
    """

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> None:
        # Each begins at 16 bytes: kernels are compiled for where their arguments lie.
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for shape in shapes]
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False):
            self._host = torch.zeros(sum(sizes), dtype=torch.int32)
            self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
            parts = zip(torch.split(self._device, sizes), shapes, strict=True)
            self.there = [part[: int(np.prod(shape))].view(shape) for part, shape in parts]
        on_host = zip(np.split(self._host.numpy(), np.cumsum(sizes)[:-1]), shapes, strict=True)
        self.here = [part[: int(np.prod(shape))].reshape(shape) for part, shape in on_host]

    def send(self) -> None:
        """Bring all of them to the device."""
        if self._device is not self._host:
            # Pinned memory of its own, which is not given to others until the copy is done: nobody waits for that.
            sent = torch.empty_like(self._host, pin_memory=self._device.is_cuda).copy_(self._host)
            self._device.copy_(sent, non_blocking=True)


class Downloads:
    """Small tensors that come to the host together, when one of them is first read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, dict[str, NDArray[np.int32]]]] = []

    def add(self, tensor: torch.Tensor) -> Read:
        """Have a tensor of int32 come with the others; it must hold what it does until one of them is read."""
        if tensor.device.type == "cpu":
            return tensor.numpy
        found: dict[str, NDArray[np.int32]] = {}
        self._waiting.append((tensor, found))

        def read() -> NDArray[np.int32]:
            if not found:
                self._bring()
            return found["values"]

        return read

    def _bring(self) -> None:
        waiting = self._waiting
        self._waiting = []
        parts = [tensor.reshape(-1) for tensor, _ in waiting]
        values = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
        start = 0
        for tensor, found in waiting:
            found["values"] = values[start : start + tensor.numel()].reshape(tensor.shape)
            start += tensor.numel()
