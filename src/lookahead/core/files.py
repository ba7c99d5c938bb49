"""Files that programs keep: where a user's caches are, and how a file is replaced as a whole."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
"""How text is written, with the same bytes on all systems: half of a surrogate pair, which UTF-8 does not have, becomes
the escape that JSON has for it."""


OWN_FOLDER = "lookahead-decoding"
"""Name of the library's folder in the user's cache."""


def user_cache() -> Path:
    """Where the user's caches are: in `XDG_CACHE_HOME`, or else where the operating system has them."""
    home, folder = Path(os.path.expanduser("~")), os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    return home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"


def hidden_name(target: Path) -> str:
    """What the names of files beside `target` begin with that are about it: short, however long its name is."""
    return f".lookahead-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}"


@contextmanager
def replaced(path: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write that takes the place of `path` once all of it is on the disk, or never.

    A symbolic link stays one, and permissions stay as they were. Text is written as `TEXT` says.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    target = Path(os.path.realpath(path))  # in its folder, as nothing could be moved there from another file system
    # A name of its own for each writer, so that two at once cannot mix their halves.
    part = target.with_name(f"{hidden_name(target)}-{uuid4().hex}.part")
    with part.open("xb") if binary else part.open("x", **TEXT) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):  # there was none, or the file system has no permissions
                part.chmod(target.stat().st_mode)
            file.close()
            part.replace(target)
        except BaseException:
            with suppress(OSError):  # what is still to be written finds no room either
                file.close()
            part.unlink()
            raise
    with suppress(OSError):  # let the new entry of the folder outlast a power cut, where the system can
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
