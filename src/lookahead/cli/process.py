"""This process: exit codes, the versions of its libraries, and Ctrl-C before decoding begins."""

from __future__ import annotations

import os
import platform
import signal
import threading
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

from lookahead.version import __version__

OK = 0
DIFFERENT = 1
"""`compare`: the outputs are not identical."""
ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output has gone."""

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def quit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once and quietly.

    A KeyboardInterrupt would not do: halfway through an import it comes out as another error, or is dropped. Where
    SIGINT is not Python's to handle (it is ignored, somebody else handles it, or this is no main thread) that stays.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again: from here on there is something to finish or to show."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):  # a spinner may have hidden the cursor
        os.write(2, _SHOW_CURSOR)
    os._exit(INTERRUPTED)


def versions() -> dict[str, str]:
    """What a report of results has to name so that others can repeat them."""
    libraries = {name: _version(name) for name in ("torch", "transformers")}
    return {"lookahead": __version__, **libraries, "python": platform.python_version()}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown (not installed)"
