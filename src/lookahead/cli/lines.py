"""Lines of standard input as they come, from a keyboard or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from lookahead.cli.prompt import checked, decoded
from lookahead.cli.rendering import Consoles
from lookahead.errors import InvalidArgumentError

MARKER = "> "


def stdin_is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def typed_lines(consoles: Consoles, *, marker_on_out: bool) -> Iterator[str]:
    """Lines from the keyboard, with a marker before each; where there is `readline` they can be edited.

    Args:
        consoles: Where the marker goes.
        marker_on_out: Whether standard output may show it; otherwise it goes to standard error.
    """
    with suppress(ImportError):  # not everywhere; `input` uses it once it is imported
        import readline  # noqa: F401
    while True:
        try:
            if marker_on_out and consoles.out.is_terminal:
                line = input(MARKER)
            else:
                consoles.notes.print(MARKER, end="")
                line = input()
            line = checked(line, "the line")
        except EOFError:
            consoles.notes.print()  # whatever comes next on the terminal begins on a line of its own
            return
        except KeyboardInterrupt:
            consoles.notes.print()
            raise
        except (UnicodeDecodeError, InvalidArgumentError):
            consoles.notes.print("error: the line is not valid UTF-8; write it in UTF-8")
            continue
        yield line


def piped_lines() -> Iterator[tuple[int, bytes]]:
    """Lines from a pipe or a file as they are, with their numbers from 1."""
    if sys.stdin is None or sys.stdin.closed:
        return
    yield from enumerate(sys.stdin.buffer, start=1)


def decoded_line(number: int, content: bytes) -> str:
    """The text of a line from a pipe, without its end.

    Raises:
        InvalidArgumentError: It is not valid UTF-8.
    """
    return decoded(content, f"line {number} of standard input").removesuffix("\n").removesuffix("\r")
