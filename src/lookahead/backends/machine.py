"""What there is of a machine: the clock that steps are timed by, and memory for keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import get_clock_info, perf_counter, thread_time

import torch

_FINE = 1e-5
"""Seconds that the clock of a thread must tell apart; on some systems it ticks in hundredths."""


def step_clock(device: torch.device) -> Callable[[], float]:
    """Seconds from any moment on, for a model on `device`.

    On a CPU the time of the calling thread, which takes part in all of the work and waits for nothing else: what other
    processes take of a busy machine would hide the differences between sizes. Elsewhere it is the wall clock.
    """
    return thread_time if device.type == "cpu" and _thread_time_is_fine() else perf_counter


class PausingClock:
    """A step clock that stands still while graphs are recorded, which is no cost of a step.

    Args:
        device: Where the model is.
    """

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


@cache
def _thread_time_is_fine() -> bool:
    return get_clock_info("thread_time").resolution <= _FINE


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
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def of_the_group(group: Path) -> list[int]:
    """Bytes that a container leaves, in a list of one, or of none where it has no limit (cgroup 2, or 1)."""
    for limit, used in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            return [max(int(limit.read_text()) - int(used.read_text()), 0)]
    return []
