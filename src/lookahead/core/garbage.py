"""Pause Python's garbage collector while it would do harm."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_held = Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in this process inside the `with` block.

    One block runs at a time, so that no block re-enables it for another.
    """
    with _held:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
