"""A rank as `launcher` starts it: it ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run `module:function` with the arguments after it, and return its exit code.

    Before it on the command line: the process that started this one, the pipe that it holds, and, on rank 0, the
    listening socket of the store, -1 on others.
    """
    parent, pipe, listener = map(int, sys.argv[1:4])
    _end_with(parent, pipe)
    module, function = sys.argv[4].split(":")
    with _store(listener):
        code: int = getattr(import_module(module), function)(sys.argv[5:])
        return code


def _end_with(parent: int, pipe: int) -> None:
    """Let this process end as soon as `parent` has, which holds the other end of `pipe`."""
    threading.Thread(target=end_after, args=(pipe,), name="lookahead-parent", daemon=True).start()
    if sys.platform == "linux":
        # The thread needs Python's lock, which a library that is being loaded may hold for long; the kernel does not.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


def end_after(pipe: int) -> None:
    """Wait until nobody holds the other end of `pipe`, and end this process at once."""
    os.read(pipe, 1)  # nothing is ever written to it
    os._exit(1)


@contextmanager
def _store(listener: int) -> Iterator[None]:
    """Keep the store of the run; for rank 0."""
    if listener < 0:
        yield
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its own list

    store = TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=listener,
    )
    try:
        yield
    finally:
        del store


if __name__ == "__main__":
    sys.exit(main())
