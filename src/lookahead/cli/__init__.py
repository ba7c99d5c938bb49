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
    """Run the command line of this process, and end the process.

    Python's own shutdown with torch loaded takes longer than many commands: 1.2 s of CPU time on an AMD EPYC. So the
    process skips it, once its threads have ended and all `atexit` functions have run.
    """
    codes: list[int] = []
    atexit.register(_end, codes)  # registered first, so called last
    codes.append(main())
    sys.exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name. If left out, the arguments of the process are used, and signals and
            standard streams are set up for the whole process.
    """
    if argv is not None:
        return _run(argv)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:  # noqa: SIM105, contextlib is slow to import
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the imports below run
        except ValueError:  # only the main thread can set handlers
            pass
    from lookahead.cli.signals import INTERRUPTED, ending, open_standard_streams

    with ending() as handler:
        open_standard_streams()
        code = _run(None)
        return 128 + handler.number if code == INTERRUPTED and handler.number is not None else code


def _run(argv: Sequence[str] | None) -> int:
    try:
        from lookahead.cli.app import run  # late, once signals are handled

        return run(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(codes: Sequence[int]) -> None:
    from contextlib import suppress

    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the stream may be missing or closed
            stream.flush()
    os._exit(codes[0])
