"""Standard input of commands: a pipe or a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator


class Terminal(io.TextIOBase):
    """A terminal: each line is typed, or raises an exception, such as that of Ctrl-C."""

    def __init__(self, typed: Iterator[str | BaseException]) -> None:
        self._typed = typed
        self.read = 0

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:
        self.read += 1
        line = next(self._typed)
        if isinstance(line, BaseException):
            raise line
        return line + "\n"


class StandardInput:
    """Standard input of the commands of one test.

    Args:
        put: Puts a stream in its place.
    """

    def __init__(self, put: Callable[[io.TextIOBase], None]) -> None:
        self._put = put
        self.pipe(b"")

    def pipe(self, content: bytes) -> None:
        """Let it be a pipe with some bytes."""
        self._put(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))

    def lines(self, *lines: str) -> None:
        """Let it be a pipe with some lines."""
        self.pipe("".join(line + "\n" for line in lines).encode())

    def type_in(self, *lines: str | BaseException) -> Terminal:
        """Let it be a terminal with some lines and keys."""
        terminal = Terminal(iter(lines))
        self._put(terminal)
        return terminal
