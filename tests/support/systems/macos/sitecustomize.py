"""Simulate macOS: hide `/proc`, `/sys`, and limits that only Linux has.

Python imports a module of this name at its start, also in child processes.
"""

from __future__ import annotations

import io
import os
import resource
from typing import Any

MOST_FILES = 10240

open_file = io.open
getrlimit, setrlimit = resource.getrlimit, resource.setrlimit


def without_proc(file: Any, *arguments: Any, **named: Any) -> Any:
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return open_file(file, *arguments, **named)


def without_end(kind: int) -> tuple[int, int]:
    """Return no hard limit on files, as a symbolic value."""
    return (256, resource.RLIM_INFINITY) if kind == resource.RLIMIT_NOFILE else getrlimit(kind)


def refusing(kind: int, limits: tuple[int, int]) -> None:
    if kind == resource.RLIMIT_AS or (kind == resource.RLIMIT_NOFILE and not 0 < limits[0] <= MOST_FILES):
        raise ValueError("current limit exceeds maximum limit")
    if kind != resource.RLIMIT_NOFILE:
        setrlimit(kind, limits)


io.open = without_proc
resource.getrlimit, resource.setrlimit = without_end, refusing
del os.sched_getaffinity
