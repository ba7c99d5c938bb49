"""Exit codes, and signals that end this process. Imported first; imports no other module of the package."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

OK = 0
DIFFERENT = 1
"""Outputs differ, or prompts were not answered."""
ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of the output has closed it."""

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""Error numbers of a full disk, and of limits for files."""

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Ending:
    """Handler of SIGINT, SIGTERM and SIGHUP.

    At first they end the process at once and without output: a KeyboardInterrupt during an import may become another
    error or be dropped. Once there is work to finish or to show, they raise KeyboardInterrupt.

    Attributes:
        raises: Whether signals raise KeyboardInterrupt.
        number: Number of the last signal, `None` before the first.
    """

    def __init__(self) -> None:
        self.raises = False
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.number = number
        if self.raises:
            raise KeyboardInterrupt
        if os.isatty(2):  # a spinner may have hidden the cursor
            os.write(2, _SHOW_CURSOR)
        os._exit(128 + number)


@contextlib.contextmanager
def ending() -> Iterator[Ending]:
    """Install a handler for the signals that this process may handle, until the end of the process.

    After the block signals end the process at once again.
    """
    handler = Ending()
    for number in filter(_is_ours, _NUMBERS):
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        handler.raises = False


def _current() -> Ending:
    """Handler of this process; a new one without effect if none is installed."""
    handlers = (signal.getsignal(number) for number in _NUMBERS)
    return next((handler for handler in handlers if isinstance(handler, Ending)), Ending())


def raise_on_interrupt() -> None:
    """Let signals raise `KeyboardInterrupt` from here on, as there is work to finish or to show."""
    _current().raises = True


def end_requested() -> bool:
    """Whether the last signal ends the program: any signal but SIGINT, which interrupts an answer."""
    return _current().number not in (None, signal.SIGINT)


def _is_ours(number: int) -> bool:
    """Whether to handle a signal: it is not ignored, has no foreign handler, and this is the main thread."""
    handler = signal.getsignal(number)
    usual = handler in (signal.default_int_handler, signal.SIG_DFL) or isinstance(handler, Ending)
    return usual and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Replace the handler of a signal inside a block, if this process may handle it."""
    if not _is_ours(number):
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def open_standard_streams() -> None:
    """Open `os.devnull` in place of closed standard streams, so that no other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    errors = sys.__stderr__
    if errors is not None and errors is sys.stderr and not os.isatty(2):
        file = open(2, "wb", closefd=False)  # noqa: SIM115
        sys.stderr = Notes(file, encoding=errors.encoding, errors="backslashreplace", line_buffering=True)


class Notes(io.TextIOWrapper):
    """Standard error that ignores a full disk, as results matter more than notes about them."""

    def write(self, text: str) -> int:
        """Write a text."""
        with _no_full_disk():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with _no_full_disk():
            super().flush()


@contextlib.contextmanager
def _no_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
