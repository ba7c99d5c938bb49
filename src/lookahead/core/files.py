"""Files that programs keep: where a user's caches are, and how a file is replaced as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO


def user_cache() -> Path:
    """Where the operating system has users' caches."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder) if os.path.isabs(folder) else home / ".cache"


@contextmanager
def replaced(path: Path) -> Iterator[IO[str]]:
    """A text file to write that takes the place of `path` once all of it is on the disk, or never.

    A symbolic link stays one, and permissions stay as they were. Half of a surrogate pair, which UTF-8 does not have,
    becomes its escape.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    target = Path(os.path.realpath(path))  # in its folder, as nothing could be moved there from another file system
    # A name of its own for each writer, so that two at once cannot mix their halves.
    name = {"dir": target.parent, "prefix": f".{target.name}.", "suffix": ".part", "delete": False}
    with NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", **name) as file:  # type: ignore[call-overload]
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, target.stat().st_mode if target.exists() else 0o666 & ~_umask())
            file.close()
            os.replace(file.name, target)
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
