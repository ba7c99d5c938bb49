"""The command line, built on the public API only."""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # see the package root
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main", "program"]


def program() -> NoReturn:
    """The `lookahead` program: run the command line of this process, and end the process.

    Taking the interpreter apart with all that torch has in it takes longer than many a command: 1.2 s of CPU time on an
    AMD EPYC. So the process ends as soon as its threads have ended and all that libraries registered for its end is
    done.
    """
    codes: list[int] = []
    atexit.register(_end, codes)  # first, and so called last
    codes.append(main())
    sys.exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process, which is then all ours, when left out.
    """
    if argv is not None:
        return _run(argv)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:  # noqa: SIM105, contextlib takes its time to import
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # quiet, until the imports below are done
        except ValueError:  # not in this thread
            pass
    from lookahead.cli import signals

    with signals.ending() as ending:
        signals.open_standard_streams()
        return signals.exit_code(_run(None), ending.number)


def _run(argv: Sequence[str] | None) -> int:
    try:
        from lookahead.cli.app import run  # late, once signals are handled

        return run(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(codes: Sequence[int]) -> None:
    """End this process with the exit code in `codes`, if there is one, without taking the interpreter apart."""
    from contextlib import suppress

    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there may be none, or it may be closed
            stream.flush()
    os._exit(codes[0])
