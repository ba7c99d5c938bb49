"""Standard input of commands: a pipe or a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator


class Terminal(io.TextIOBase):
    """A terminal with typed lines; an exception in their place is raised, for example `KeyboardInterrupt`."""

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
        put: Function that replaces standard input by a stream.
    """

    def __init__(self, put: Callable[[io.TextIOBase], None]) -> None:
        self._put = put
        self.pipe(b"")

    def pipe(self, content: bytes) -> None:
        """Make standard input a pipe with these bytes."""
        self._put(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))

    def lines(self, *lines: str) -> None:
        """Make standard input a pipe with these lines."""
        self.pipe("".join(line + "\n" for line in lines).encode())

    def type_in(self, *lines: str | BaseException) -> Terminal:
        """Make standard input a terminal with these lines and keys."""
        terminal = Terminal(iter(lines))
        self._put(terminal)
        return terminal
