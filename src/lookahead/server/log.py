"""Log of a server on standard error. A reader that is slow or gone blocks nothing."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from queue import Full, Queue
from threading import Thread

_MAX_TEXTS = 1000
"""Largest number of unwritten texts; further ones are dropped."""

_GRACE = 5.0
"""Seconds to write the last texts when the server ends."""


def write_line(text: str) -> None:
    """Write a line; ignore a full disk or a closed pipe."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class PatientStream(io.TextIOBase):
    """Text stream that writes to a file descriptor in its own thread."""

    encoding = "utf-8"

    def __init__(self, file: int) -> None:
        self._file = file
        self._texts: Queue[str | None] = Queue(_MAX_TEXTS)
        self._lost = 0
        self._thread = Thread(target=self._write_all, name="lookahead-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a text; drop it if the queue is full."""
        try:
            self._texts.put_nowait(text)
        except Full:
            self._lost += 1
        return len(text)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def isatty(self) -> bool:
        """Return whether the file is a terminal."""
        return os.isatty(self._file)

    def finish(self) -> None:
        """Wait up to `_GRACE` seconds for the queued texts."""
        with suppress(Full):
            self._texts.put(None, timeout=_GRACE)
            self._thread.join(_GRACE)

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                text += f"warning: {lost} texts of the log are lost, because its reader was too slow\n"
            data = text.encode(errors="backslashreplace")
            with suppress(OSError):  # the disk is full, or the pipe is closed
                while data:
                    data = data[os.write(self._file, data) :]


@contextmanager
def patient_stderr() -> Iterator[None]:
    """Replace standard error by a `PatientStream`, also for the log of transformers."""
    try:
        stream = PatientStream(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # standard error is missing or is not a file
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
