"""One writer of a file at a time, over threads and processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any

try:
    _fcntl: Any = import_module("fcntl")
except ImportError:  # there is none on Windows
    _fcntl = None

_HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
_PAUSE = 0.01


@contextmanager
def exclusive(lock: Path, timeout: float = 30.0) -> Iterator[bool]:
    """Hold a lock file, which is there only meanwhile.

    Args:
        lock: Its name. One that a killed process left behind is in nobody's way.
        timeout: Seconds to wait for others.

    Yields:
        Whether others are kept out; they are not where the system or the file system knows no locks.

    Raises:
        TimeoutError: Others held it all the time.
        OSError: It cannot be made.
    """
    if _fcntl is None:
        yield False
        return
    descriptor, held = _acquire(lock, monotonic() + timeout)
    try:
        yield held
    finally:
        # Under its name as long as it is held: whoever waits for it finds that the name has gone, and begins anew.
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _acquire(lock: Path, deadline: float) -> tuple[int, bool]:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor, True
        except OSError as error:
            if error.errno not in _HELD_BY_OTHERS:
                return descriptor, False
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if monotonic() > deadline:
            raise TimeoutError(f"{lock} is held by another process")
        sleep(_PAUSE)
