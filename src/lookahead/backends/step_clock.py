"""The clock that steps are timed by."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


@cache
def _thread_time_is_fine() -> bool:
    return get_clock_info("thread_time").resolution <= _FINE
