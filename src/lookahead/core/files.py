"""Files that programs keep: where a user's caches are, and how a file is replaced as a whole."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any


def user_cache() -> Path:
    """Where the operating system has users' caches."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder) if os.path.isabs(folder) else home / ".cache"


def hidden_name(target: Path) -> str:
    """What the names of files beside `target` begin with that are about it: short, however long its name is."""
    return f".lookahead-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}"


@contextmanager
def replaced(path: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write that takes the place of `path` once all of it is on the disk, or never.

    A symbolic link stays one, and permissions stay as they were. In a file of text, which is UTF-8, half of a surrogate
    pair becomes its escape.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    target = Path(os.path.realpath(path))  # in its folder, as nothing could be moved there from another file system
    # A name of its own for each writer, so that two at once cannot mix their halves.
    options: dict[str, Any] = {"dir": target.parent, "prefix": f"{hidden_name(target)}-", "suffix": ".part"}
    if not binary:
        options |= {"encoding": "utf-8", "errors": "backslashreplace"}
    with NamedTemporaryFile("wb" if binary else "w", delete=False, **options) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):  # not all file systems have permissions
                os.chmod(file.name, target.stat().st_mode if target.exists() else 0o666 & ~_umask())
            file.close()
            os.replace(file.name, target)
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Let the new entry of the folder outlast a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
