"""The file of a memory: complete at any time, and shared by several writers."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

from filelock import FileLock

from lookahead.drafting import DraftMemory
from lookahead.errors import InvalidArgumentError

_PATIENCE = 30.0
"""Seconds to wait for others who write the same file."""

_Version = tuple[int, int, int, int]
"""Identifies one content of a file; each content is written to a new file."""


class MemoryFile:
    """A memory and its file, for one model object.

    Threads may save at the same time, and so may other objects and processes with files of the same name: what others
    wrote meanwhile is merged in, so that what any of them learned is there afterwards. The file is replaced as a whole,
    after its content has reached the disk. A symbolic link stays one.

    Args:
        path: The file, which need not be there yet.
        model: Which model the memory belongs to; see `DraftMemory.save`.
        new: Makes a memory where there is no file yet.

    Attributes:
        path: As given.
        memory: What the file held, and what was learned since.

    Raises:
        InvalidArgumentError: There cannot be a file of that name, or it is no memory of this model.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, model: str, new: Callable[[], DraftMemory] = DraftMemory) -> None:
        _check_place(path)
        self.path = path
        self._saving = Lock()
        self._read_version = _version(path)  # before it is read, so that what comes in between is read again
        self.memory = new() if self._read_version is None else DraftMemory.load(path, model)
        self._saved_clock = -1 if self._read_version is None else self.memory.clock

    def save(self, model: str) -> None:
        """Bring all that was learned so far to the file.

        Args:
            model: As above.

        Raises:
            OSError: The file cannot be written; it is as it was.
            InvalidArgumentError: The file has become something else, and was left alone.
        """
        learned = self.memory.clock
        with self._saving:
            if learned <= self._saved_clock and _version(self.path) == self._read_version:
                return  # another thread's save included it
            _check_kind(self.path)
            target = Path(os.path.realpath(self.path))
            name = f".lookahead-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}"
            with FileLock(target.with_name(f"{name}.lock"), timeout=_PATIENCE):
                if (version := _version(target)) not in (None, self._read_version):  # others wrote it meanwhile
                    self.memory.merge(DraftMemory.load(target, model))
                    self._read_version = version
                for part in target.parent.glob(f"{name}-*.part"):  # whoever began to write it is dead
                    with suppress(OSError):
                        part.unlink()
                self._write(target, target.with_name(f"{name}-{uuid4().hex}.part"), model)

    def _write(self, target: Path, part: Path, model: str) -> None:
        """Write the memory to `part`, and give it the name `target`."""
        try:
            clock = self.memory.save(part, model)
            with suppress(OSError):
                os.chmod(part, stat.S_IMODE(os.stat(target).st_mode))  # permissions stay as they were
            version = _version(part)
            os.replace(part, target)
        finally:
            with suppress(OSError):
                part.unlink()
        self._read_version, self._saved_clock = version, clock
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Let the new entry of the folder outlast a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _version(path: Path) -> _Version | None:
    """What `path` holds now; `None` if there is nothing."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_place(path: Path) -> None:
    """Make the folder of a memory: before anything is generated, not after."""
    try:
        _check_kind(path)
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
    except InvalidArgumentError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written: {error}; choose another file") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written; choose a file in a folder of yours")


def _check_kind(path: Path) -> None:
    """Refuse what is there but is no file: a folder, a pipe, a socket, a device.

    Raises:
        InvalidArgumentError: It is something else.
        OSError: It cannot be found out.
    """
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_file:
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written: it is no file; choose another file")
