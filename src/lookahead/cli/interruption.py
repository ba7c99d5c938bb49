"""Ctrl-C while an answer is being generated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import StoppingCriteria


class Interruption(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that is met once somebody asks.

    Stopping in this way ends generation between two tokens, with an output and a cache like those of any other end.

    Attributes:
        asked: Whether generation should stop.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.asked, dtype=torch.bool)  # on the CPU: nobody waits for a device


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let Ctrl-C ask for a stop. A second one does not wait and raises `KeyboardInterrupt`.

    Where SIGINT is not Python's to handle (it is ignored, somebody else handles it, or this is no main thread) that
    stays as it is.
    """
    interruption = Interruption()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interruption
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if interruption.asked:
            raise KeyboardInterrupt
        interruption.asked = True

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
