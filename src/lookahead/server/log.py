"""Standard error of a server, which nothing waits for: who reads it may be slow, or have stopped."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from queue import Full, Queue
from threading import Thread

_MOST_TEXTS = 1000
"""That wait to be written. More are lost."""

_GRACE = 5.0
"""Seconds in which the last texts have to be written."""


def write_line(text: str) -> None:
    """Write a line, unless the disk is full, or whoever read the log has gone."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class PatientStream(io.TextIOBase):
    """Writes to a file in a thread of its own.

    Args:
        file: The file's descriptor.
    """

    encoding = "utf-8"

    def __init__(self, file: int) -> None:
        self._file = file
        self._texts: Queue[str | None] = Queue(_MOST_TEXTS)
        self._lost = 0
        self._thread = Thread(target=self._write_all, name="lookahead-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Have a text written. It is lost where too many wait."""
        try:
            self._texts.put_nowait(text)
        except Full:
            self._lost += 1
        return len(text)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._file)

    def finish(self) -> None:
        """Wait a while for what is not written yet."""
        with suppress(Full):
            self._texts.put(None, timeout=_GRACE)
            self._thread.join(_GRACE)

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                text += f"warning: {lost} texts of the log are lost, as nobody read it\n"
            left = text.encode(errors="backslashreplace")
            with suppress(OSError):  # the disk is full, or who read it has gone
                while left:
                    left = left[os.write(self._file, left) :]


@contextmanager
def patient_stderr() -> Iterator[None]:
    """Let nothing of this process wait for standard error."""
    try:
        stream = PatientStream(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # there is none, or none that can be waited for
        yield
        return
    before = sys.stderr
    handlers = [
        handler
        for handler in logging.getLogger("transformers").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is before
    ]
    for handler in handlers:
        handler.setStream(stream)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        stream.finish()
        for handler in handlers:
            handler.setStream(before)
