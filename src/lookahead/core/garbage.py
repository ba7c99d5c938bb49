"""Python's garbage collector, held back while it would do harm."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_held = Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts, nobody in this process collects garbage; one at a time, so that none ends it for another."""
    with _held:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
