"""Signals that ask this process to end. Imported first, and so without any other module of this package."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Ending:
    """Handles the signals that ask to end.

    At first they end the process at once and quietly: a KeyboardInterrupt halfway through an import comes out as
    another error, or is dropped. Once there is something to finish or to show, they raise it.

    Attributes:
        raises: Whether they do.
        number: The signal that asked last.
    """

    def __init__(self) -> None:
        self.raises = False
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: There is something to finish.
        """
        self.number = number
        if self.raises:
            raise KeyboardInterrupt
        if os.isatty(2):  # a spinner may have hidden the cursor
            os.write(2, _SHOW_CURSOR)
        os._exit(128 + number)


@contextlib.contextmanager
def ending() -> Iterator[Ending]:
    """Handle the signals that ask to end, those that are ours to handle, until the end of the process.

    Behind the block they end it at once again: nothing is left to finish.
    """
    handler = Ending()
    for number in filter(_is_ours, _NUMBERS):
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        handler.raises = False


def _current() -> Ending:
    """The handler of this process; one that knows of nothing if there is none."""
    handlers = (signal.getsignal(number) for number in _NUMBERS)
    return next((handler for handler in handlers if isinstance(handler, Ending)), Ending())


def raise_on_interrupt() -> None:
    """Let signals raise `KeyboardInterrupt`: from here on there is something to finish or to show."""
    _current().raises = True


def asked_to_end() -> bool:
    """Whether a signal came that asks for more than to interrupt an answer."""
    return _current().number not in (None, signal.SIGINT)


def exit_code(code: int, number: int | None) -> int:
    """The exit code of a run that a signal may have interrupted."""
    return 128 + number if code == INTERRUPTED and number is not None else code


def _is_ours(number: int) -> bool:
    """Whether a signal is ours to handle: not where it is ignored, where somebody else handles it, or in another thread
    than the main one."""
    handler = signal.getsignal(number)
    usual = handler in (signal.default_int_handler, signal.SIG_DFL) or isinstance(handler, Ending)
    return usual and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle a signal in another way for a while, if it is ours to handle."""
    if not _is_ours(number):
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def open_standard_streams() -> None:
    """Give the numbers of standard streams that are closed to `os.devnull`, lest another file gets them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
