"""The command line, built on the public API only."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import NoReturn

from lookahead.cli import process

__all__ = ["main", "program"]


def program() -> NoReturn:
    """The `lookahead` program: run the command line of this process, and end the process.

    Taking the interpreter apart with all that torch has in it takes longer than many a command: 1.2 s of CPU time on an
    AMD EPYC. So the process ends as soon as its threads have ended and all that libraries registered for its end is
    done.
    """
    codes: list[int] = []
    atexit.register(process.end, codes)  # first, and so called last
    codes.append(main())
    sys.exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process, which is then all ours, when left out.
    """
    try:
        if argv is None:
            process.quit_on_interrupt()
        from lookahead.cli.app import run

        return run(argv)
    except KeyboardInterrupt:
        return process.INTERRUPTED
