"""Running out of memory, told in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lookahead.errors import LookaheadError


class OutOfMemoryError(LookaheadError):
    """The device has no memory left for what was asked."""


@contextmanager
def memory_errors_explained(where: str, advice: str) -> Iterator[None]:
    """Turn running out of memory into an `OutOfMemoryError` that says what to try."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        detail = f" (tried to allocate {asked[1]})" if asked else ""
        raise OutOfMemoryError(f"out of memory {where}{detail}: try {advice}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine itself, has no memory left; torch has no type of error for some of them."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
