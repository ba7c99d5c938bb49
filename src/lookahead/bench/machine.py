"""Where a benchmark runs, and what it takes of the machine."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.transformers.cost_store import device_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The processor that does the work, and how many threads it may use."""
    return {"type": device.type, "device": device_name(device), "threads": torch.get_num_threads()}


def resident_bytes() -> int | None:
    """Memory of this process that lies in RAM, in bytes; `None` where that cannot be had.

    From the system itself on Linux, elsewhere from psutil, if that is installed.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int(import_module("psutil").Process().memory_info().rss)
    except ImportError:
        return None
