"""Files on disk: the user's cache folder, and atomic replacement of a file."""

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
"""Options for writing text with the same bytes on all systems; half of a surrogate pair, which UTF-8 cannot encode,
becomes its JSON escape."""

OWN_FOLDER = "lookahead-decoding"
"""Name of the library's folder in the user's cache."""


def user_cache() -> Path:
    """Return the user's cache folder: `XDG_CACHE_HOME`, or the default of the operating system."""
    home = Path(os.path.expanduser("~"))
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    return home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"


def hidden_name(target: Path) -> str:
    """Return the prefix of hidden files that belong to `target`: short, whatever the length of its name."""
    return f".lookahead-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}"


@contextmanager
def replaced(path: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file for writing that replaces `path` once all of it is on the disk, or not at all.

    Symbolic links and permissions stay as they were. Text is written with the options of `TEXT`.

    Raises:
        OSError: The file cannot be written; the old content is unchanged.
    """
    target = Path(os.path.realpath(path))  # the part file is in the same folder: a move between disks is not atomic
    # Each writer has its own name, so that two at once cannot mix their halves.
    part = target.with_name(f"{hidden_name(target)}-{uuid4().hex}.part")
    with part.open("xb") if binary else part.open("x", **TEXT) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):  # `target` is new, or the file system has no permissions
                part.chmod(target.stat().st_mode)
            file.close()
            part.replace(target)
        except BaseException:
            with suppress(OSError):  # on a full disk, closing fails as well
                file.close()
            part.unlink()
            raise
    with suppress(OSError):  # make the new folder entry survive a power cut, if the system can
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
