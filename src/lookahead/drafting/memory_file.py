"""Memory file: complete at any time, and shared by several writers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from lookahead.core.files import hidden_name, replaced
from lookahead.drafting import DraftMemory
from lookahead.drafting.auto.ngrams import EVIDENCE_PRIOR, WAYS
from lookahead.errors import InvalidArgumentError, not_of_signal

_PATIENCE = 30.0
"""Maximum time to wait for other writers of the file, in seconds."""

_FORMAT = 2
_NO_MEMORY = "is no saved memory"


class _DamagedFileError(ValueError):
    """Error for an unusable file; the message describes the fault without the file's name."""


class MemoryFile:
    """A memory and its file, for one model object.

    Several threads, objects and processes may save to files of the same name at once: the entries of other writers are
    merged in, so nothing learned is lost. The file is replaced as a whole, after its content has reached the disk. A
    symbolic link stays one.

    Args:
        path: The file; it may not exist yet.
        model: Identifier of the model that the memory belongs to; see `save_memory`.
        new: Factory of the memory if there is no file yet.

    Attributes:
        path: The file.
        memory: Content of the file, and entries learned since.

    Raises:
        InvalidArgumentError: The file cannot be written, or is no memory of this model.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, model: str, new: Callable[[], DraftMemory] = DraftMemory) -> None:
        _check_place(path)
        self.path = path
        self._saving = Lock()
        self._read_version = _version(path)  # before reading, so that a write in between is noticed
        self.memory = new() if self._read_version is None else load_memory(path, model)
        self._saved_clock = -1 if self._read_version is None else self.memory.clock

    def save(self, model: str) -> None:
        """Write everything learned so far to the file.

        Args:
            model: Identifier of the model.

        Raises:
            OSError: The file cannot be written; it is unchanged.
            InvalidArgumentError: The path is no longer a memory file, and was left alone.
        """
        learned = self.memory.clock
        with self._saving:
            if learned <= self._saved_clock and _version(self.path) == self._read_version:
                return  # another thread's save included it
            _check_kind(self.path)
            target = Path(os.path.realpath(self.path))
            name = hidden_name(target)
            with FileLock(target.with_name(f"{name}.lock"), timeout=_PATIENCE):
                if (version := _version(target)) not in (None, self._read_version):  # another writer replaced it
                    merge(self.memory, load_memory(target, model))
                    self._read_version = version
                for part in target.parent.glob(f"{name}-*.part"):  # left by a writer that was killed
                    with suppress(OSError):
                        part.unlink()
                self._saved_clock = save_memory(self.memory, target, model)
                self._read_version = _version(target)


def _version(path: Path) -> tuple[int, int, int, int] | None:
    """Return an identifier of the content, which is a new file each time; `None` if the file is missing or empty."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if status.st_size == 0:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_place(path: Path) -> None:
    """Create the folder of a memory file, before any text is generated."""
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
    """Refuse a path that is no regular file, such as a folder, a pipe, a socket or a device.

    Raises:
        InvalidArgumentError: The path is no regular file.
        OSError: The path cannot be inspected.
    """
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_file:
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written: it is no file; choose another file")


def merge(memory: DraftMemory, other: DraftMemory) -> None:
    """Merge the entries of another memory of the same model into `memory`.

    The newest entry of a context is kept, and in a full set the newest entries. `other` is unchanged.

    Raises:
        InvalidArgumentError: The sizes differ.
    """
    if (memory.orders, memory.capacity, memory.top_k) != (other.orders, other.capacity, other.top_k):
        raise InvalidArgumentError(
            f"a memory of orders={other.orders}, capacity={other.capacity}, top_k={other.top_k} cannot be merged into "
            f"one of orders={memory.orders}, capacity={memory.capacity}, top_k={memory.top_k}; use equal sizes"
        )
    mine = memory.entries
    theirs = other.entries
    with memory.lock:
        memory.clock = max(memory.clock, other.clock)
        heads, followers = (
            np.concatenate([one.reshape(-1, WAYS, *one.shape[2:]), two.reshape(-1, WAYS, *two.shape[2:])], axis=1)
            for one, two in zip(mine[:2], theirs[:2], strict=True)
        )  # both memories' entries of each set, `[sets, 2 * ways, ...]`
        tags = heads["tag"]
        stamps = np.where(heads["tag"], heads["stamp"].astype(np.int64), -1)
        same = (tags[:, :WAYS, None] == tags[:, None, WAYS:]) & (tags[:, :WAYS, None] != 0)
        newer = stamps[:, None, WAYS:] > stamps[:, :WAYS, None]
        stamps[:, :WAYS][(same & newer).any(axis=2)] = -1
        stamps[:, WAYS:][(same & ~newer).any(axis=1)] = -1
        tags[stamps < 0] = 0
        ways = np.sort(np.argsort(-stamps, axis=1, kind="stable")[:, :WAYS], axis=1)
        mine.heads[:] = np.take_along_axis(heads, ways, 1).reshape(mine.heads.shape)
        taken = np.take_along_axis(followers, ways[:, :, None], 1)
        mine.followers[:] = taken.reshape(mine.followers.shape)
        mine.evidence[:] = (mine.evidence + theirs.evidence) / 2
        known = memory.vocabulary
        memory.vocabulary = other.vocabulary
        memory.fit(known)


def save_memory(memory: DraftMemory, path: str | Path, model: str) -> int:
    """Write a memory to a file, as numpy arrays without pickled objects; on return it is on the disk.

    Args:
        memory: The memory.
        path: The file, which is replaced as a whole.
        model: Identifier of the model that filled the memory: any string.

    Returns:
        The memory's `clock` at the time of writing.

    Raises:
        OSError: The file cannot be written; it is unchanged.
    """
    with memory.lock:
        arrays = memory_arrays(memory)
        clock = memory.clock
        vocabulary = np.array(memory.vocabulary, dtype=np.int64)
    with replaced(Path(path), binary=True) as file:
        np.savez(  # uncompressed: compression takes far longer than writing
            file,
            allow_pickle=False,
            format=np.array(_FORMAT, dtype=np.int64),
            model=np.array(model),
            vocabulary=vocabulary,
            **arrays,
        )
    return clock


def load_memory(path: str | Path, model: str) -> DraftMemory:
    """Read a file written by `save_memory`.

    Args:
        path: The file.
        model: Identifier of the model.

    Raises:
        InvalidArgumentError: The file is no saved memory, damaged, or from another version or model.
        OSError: The file cannot be read.
    """
    content = BytesIO(Path(path).read_bytes())
    try:
        with np.load(content, allow_pickle=False) as arrays:
            version = int(_expect(arrays, "format", np.int64, ()))
            owner = str(arrays["model"])
            if version != _FORMAT:
                raise _DamagedFileError(
                    f"was written by another version of this library (format {version}, this one reads {_FORMAT})"
                )
            if owner != model:
                if "vocabulary" in arrays:
                    owner += f", {arrays['vocabulary']} tokens"
                raise _DamagedFileError(
                    f"was filled from another model ({owner}) than {model}: each model needs a file of its own"
                )
            return memory_of(arrays)
    except Exception as error:  # zipfile, zlib and numpy raise all kinds for damaged files
        what = f"{_NO_MEMORY}: it is cut short or has another format"
        if isinstance(error, _DamagedFileError):
            what = str(error)
        raise InvalidArgumentError(
            f"memory={str(path)!r} {what}; delete the file or choose another"
        ) from not_of_signal(error)


def memory_arrays(memory: DraftMemory) -> dict[str, NDArray[np.generic]]:
    """Return the content of a memory as arrays by name."""
    heads = memory.entries.heads.reshape(-1)
    followers = memory.entries.followers.reshape(-1, memory.top_k)
    used = np.flatnonzero(heads["tag"])
    return {
        "ngram_sizes": np.array([memory.orders, memory.capacity, memory.top_k, memory.clock], dtype=np.int64),
        "ngram_old_share": np.array(memory.old_share),
        "ngram_slots": used.astype(np.int64),
        "ngram_tags": heads["tag"][used],
        "ngram_stamps": heads["stamp"][used],
        "ngram_ids": followers["token"][used],
        "ngram_logs": followers["log"][used],
        "ngram_floors": heads["floor"][used],
        "ngram_evidence": memory.entries.evidence.copy(),
    }


def memory_of(arrays: Mapping[str, NDArray[Any]]) -> DraftMemory:
    """Return the memory with the content from `memory_arrays`.

    Raises:
        _DamagedFileError: An array is missing or inconsistent.
        Exception: The sizes are out of range.
    """
    orders, capacity, top_k, clock = _expect(arrays, "ngram_sizes", np.int64, (4,)).tolist()
    memory = DraftMemory(orders, capacity, top_k, float(_expect(arrays, "ngram_old_share", np.float64, ())))
    heads = memory.entries.heads.reshape(-1)
    followers = memory.entries.followers.reshape(-1, top_k)
    slots = _expect(arrays, "ngram_slots", np.int64, (None,))
    count = len(slots)
    stamps = _expect(arrays, "ngram_stamps", np.uint32, (count,))
    if memory.capacity != capacity or stamps.max(initial=0) > clock or slots.min(initial=0) < 0:
        raise _DamagedFileError(f"{_NO_MEMORY}: its arrays do not belong together")
    memory.clock = clock
    heads["tag"][slots], heads["stamp"][slots] = _expect(arrays, "ngram_tags", np.int64, (count,)), stamps
    heads["floor"][slots] = _expect(arrays, "ngram_floors", np.float32, (count,))
    followers["token"][slots] = _expect(arrays, "ngram_ids", np.int32, (count, top_k))
    followers["log"][slots] = _expect(arrays, "ngram_logs", np.float32, (count, top_k))
    if "ngram_evidence" in arrays:  # older files have none
        evidence = _expect(arrays, "ngram_evidence", np.float64, memory.entries.evidence.shape)
        memory.entries.evidence[:] = np.maximum(evidence, EVIDENCE_PRIOR / 2)
    return memory


def _expect(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: DTypeLike, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """Return the array called `name`, after checking it.

    Args:
        arrays: Arrays by name.
        name: Name of the array.
        dtype: Its type; floating-point numbers must be finite.
        shape: Its shape; `None` allows any size.

    Raises:
        _DamagedFileError: The array is missing, or has another type or shape.
    """
    if name not in arrays:
        raise _DamagedFileError(f"{_NO_MEMORY}: it lacks the array {name!r}")
    array = arrays[name]
    sizes = tuple(size if want is None else want for size, want in zip(array.shape, shape, strict=False))
    if array.dtype != np.dtype(dtype) or array.ndim != len(shape) or array.shape != sizes:
        raise _DamagedFileError(f"{_NO_MEMORY}: its array {name!r} is a {array.dtype} of shape {list(array.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _DamagedFileError(f"{_NO_MEMORY}: its array {name!r} holds numbers that are not finite")
    return array
