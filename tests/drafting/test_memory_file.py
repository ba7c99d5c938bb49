"""The file of a memory: always complete, shared by several writers, and refused if it is another kind of file."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lookahead.drafting import DraftMemory
from lookahead.drafting.auto.ngrams import WAYS
from lookahead.drafting.memory_file import MemoryFile, load_memory, memory_arrays, memory_of, merge, save_memory
from lookahead.errors import InvalidArgumentError
from ngram_access import insert, lookup

MODEL = "a model"
ORDERS = DraftMemory().orders


def teach(memory: DraftMemory, token: int, following: int, probability: float = 0.5) -> None:
    """Teach that `following` comes after `token`, and after any repetition of it."""
    context = np.full((1, memory.orders), token)
    insert(memory, context, np.array([[following]]), np.array([[probability]], dtype=np.float32))


def known(memory: DraftMemory, token: int) -> int | None:
    """Return the prediction after the longest context of `token`; `None` if the context is unknown."""
    is_known, ids, _ = lookup(memory, np.full((1, memory.orders), token))
    return int(ids[0, -1, 0]) if is_known[0, -1] else None


def files(folder: Path) -> list[str]:
    """Return the names of files in a folder, without the lock file."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def save_lessons(path: Path, tokens: range, repeats: int = 1) -> None:
    for _ in range(repeats):
        for token in tokens:
            file = MemoryFile(path, MODEL)
            teach(file.memory, token, token + 1000)
            file.save(MODEL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.npz"


def test_two_objects_with_one_file_merge_their_memories(path: Path) -> None:
    one, two = MemoryFile(path, MODEL), MemoryFile(path, MODEL)
    for step in range(3):
        for file, first in ((one, 0), (two, 100)):
            teach(file.memory, first + step, 7 + step)
            file.save(MODEL)
    merged = load_memory(path, MODEL)
    assert [known(merged, first + step) for first in (0, 100) for step in range(3)] == [7, 8, 9] * 2
    assert known(two.memory, 0) == 7, "and each drafts from what the other one wrote"
    assert files(path.parent) == [path.name]


def test_processes_with_one_file_merge_their_memories(path: Path) -> None:
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    processes = [context.Process(target=save_lessons, args=(path, range(first, first + 10))) for first in (0, 100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    merged = load_memory(path, MODEL)
    missing = [token for first in (0, 100, 200) for token in range(first, first + 10) if known(merged, token) is None]
    assert not missing
    assert files(path.parent) == [path.name]


def test_a_save_that_brings_nothing_new_writes_nothing(path: Path) -> None:
    file = MemoryFile(path, MODEL)
    teach(file.memory, 1, 2)
    file.save(MODEL)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    file.save(MODEL)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    path.unlink()
    file.save(MODEL)
    assert known(load_memory(path, MODEL), 1) == 2


def copied(memory: DraftMemory) -> DraftMemory:
    return memory_of(memory_arrays(memory))


def test_of_one_context_the_newest_lesson_stays() -> None:
    memories = [DraftMemory(2, 64, 1) for _ in range(2)]
    for memory in memories:
        teach(memory, 1, 10)
    base = copied(memories[0])
    teach(memories[0], 1, 20)
    teach(memories[1], 2, 30)
    teach(memories[1], 1, 40)
    mine, theirs = map(copied, memories)
    merge(mine, memories[1])
    merge(theirs, memories[0])
    assert known(mine, 2) == known(theirs, 2) == 30
    assert known(mine, 1) == known(theirs, 1) == 40
    merge(base, memories[0])
    assert known(base, 1) == 20, "a lesson that both had before gives way"


def test_merging_keeps_the_newest_of_a_full_set() -> None:
    one, two = (DraftMemory(1, WAYS, 1) for _ in range(2))
    for token in range(WAYS):
        teach(one, token, token)
        teach(two, 10 + token, token)
    merge(one, two)
    assert sum(one.statistics()["entries"]) == WAYS
    assert known(one, WAYS - 1) is not None
    assert known(one, 10 + WAYS - 1) is not None
    assert known(one, 0) is known(one, 10) is None


def test_merging_agrees_with_a_dictionary() -> None:
    """While nothing is evicted, the result has the contexts of both, each with the predictions of one."""
    rng = np.random.default_rng(0)
    memories = [DraftMemory(2, 4096, 2) for _ in range(2)]
    lessons: list[dict[int, int]] = [{}, {}]
    for _ in range(300):
        side, token, following = int(rng.integers(2)), int(rng.integers(60)), int(rng.integers(500))
        teach(memories[side], token, following)
        lessons[side][token] = following
    one, two = memories
    merge(one, two)
    for token in range(60):
        options = {side[token] for side in lessons if token in side}
        assert (known(one, token) in options) if options else known(one, token) is None
    copy = copied(one)
    merge(copy, two)
    assert all(np.array_equal(array, memory_arrays(copy)[name]) for name, array in memory_arrays(one).items())


def test_memories_of_other_sizes_are_not_merged() -> None:
    memory = DraftMemory(2, 64, 1)
    with pytest.raises(InvalidArgumentError, match="orders=3"):
        merge(memory, DraftMemory(3, 64, 1))


def test_leftovers_of_a_killed_save_are_removed(path: Path) -> None:
    def die(*_: object) -> None:
        os._exit(9)

    def killed(patch: Callable[[], None]) -> None:
        patch()
        save_lessons(path, range(5, 6))

    save_lessons(path, range(1))
    context = multiprocessing.get_context("fork")
    for name in ("fsync", "replace"):
        process = context.Process(target=killed, args=(lambda name=name: setattr(os, name, die),))  # type: ignore[misc]
        process.start()
        process.join(600)
        assert process.exitcode == 9
    others = path.parent / "memory.npz.1234.part", path.parent / ".lookahead-of-somebody.part"
    for other in others:
        other.write_text("not ours")
    assert len(files(path.parent)) == 1 + 2 + 1, "the file, those of others, and a part"
    assert known(load_memory(path, MODEL), 0) == 1000, "the old content is there"
    save_lessons(path, range(1, 2))
    assert files(path.parent) == sorted(file.name for file in (path, *others))


def test_a_full_disk_leaves_the_old_file(path: Path, full_disk: Callable[[], AbstractContextManager[None]]) -> None:
    save_lessons(path, range(1))
    content = path.read_bytes()
    file = MemoryFile(path, MODEL)
    teach(file.memory, 3, 4)
    with full_disk(), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        file.save(MODEL)
    assert path.read_bytes() == content
    assert files(path.parent) == [path.name]
    file.save(MODEL)  # with space again, nothing is missing
    assert known(load_memory(path, MODEL), 3) == 4


def test_the_content_reaches_the_disk_before_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(function: Callable[..., None]) -> Callable[..., None]:
        def note(*given: Any) -> None:
            is_folder = function is fsync and stat.S_ISDIR(os.fstat(*given).st_mode)
            order.append("name" if function is not fsync else "folder" if is_folder else "file")
            function(*given)

        return note

    fsync = os.fsync
    for function in (os.fsync, os.replace):
        monkeypatch.setattr(os, function.__name__, noting(function))
    save_lessons(path, range(1))
    assert order == ["file", "name", "folder"]


def test_a_link_is_followed_and_stays(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "kept.npz"
    path.symlink_to(target)  # to a folder that does not exist yet
    save_lessons(path, range(2))
    assert path.is_symlink()
    assert known(load_memory(target, MODEL), 1) == 1001
    assert files(target.parent) == [target.name]


def test_the_mode_of_a_file_stays(path: Path) -> None:
    save_lessons(path, range(1))
    path.chmod(0o640)
    save_lessons(path, range(1, 2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, TemporaryDirectory() as short:
        listening.bind(f"{short}/socket")  # the name of a socket is short
        os.rename(f"{short}/socket", path)


def test_an_empty_file_becomes_a_memory(path: Path) -> None:
    path.touch()
    file = MemoryFile(path, MODEL)
    teach(file.memory, 1, 2)
    file.save(MODEL)
    assert known(load_memory(path, MODEL), 1) == 2


def test_a_file_of_something_else_is_left_alone(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(InvalidArgumentError, match="is no saved memory"):
        MemoryFile(path, MODEL)
    path.unlink()
    file = MemoryFile(path, MODEL)
    teach(file.memory, 1, 2)
    path.write_bytes(b"mine")  # between loading and saving
    with pytest.raises(InvalidArgumentError, match="is no saved memory"):
        file.save(MODEL)
    assert path.read_bytes() == b"mine"


MAKERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_paths_that_are_no_regular_file_are_refused(kind: str, path: Path) -> None:
    MAKERS[kind](path)
    with pytest.raises(InvalidArgumentError, match=r"memory='.*memory\.npz' cannot be written: it is no file"):
        MemoryFile(path, MODEL)
    path.rmdir() if kind == "a folder" else path.unlink()
    file = MemoryFile(path, MODEL)
    teach(file.memory, 1, 2)
    MAKERS[kind](path)  # meanwhile
    with pytest.raises(InvalidArgumentError, match="it is no file"):
        file.save(MODEL)


@pytest.mark.parametrize("name", ["loop", "null\0byte", "x" * 300])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    if name == "loop":
        (tmp_path / name).symlink_to(name)
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        MemoryFile(tmp_path / name, MODEL)


def test_the_longest_name_is_no_trouble(tmp_path: Path) -> None:
    save_lessons(tmp_path / ("x" * 255), range(1))
    assert known(load_memory(tmp_path / ("x" * 255), MODEL), 0) == 1000


# Damaged files


def content(**changes: NDArray[Any] | None) -> bytes:
    """Return the bytes of a small memory file, with some arrays replaced or left out."""
    memory = DraftMemory(2, 64, 2)
    for token in range(5):
        teach(memory, token, token)
    arrays: dict[str, Any] = {"format": np.array(2), "model": np.array(MODEL)}
    arrays |= memory_arrays(memory) | changes
    stream = io.BytesIO()
    np.savez_compressed(stream, **{name: array for name, array in arrays.items() if array is not None})
    return stream.getvalue()


def check_refused(path: Path, data: bytes, match: str = "memory=") -> None:
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=match) as refused:
        load_memory(path, MODEL)
    message = str(refused.value)
    assert f"memory={str(path)!r}" in message
    assert message.endswith("delete the file or choose another")
    for word in ("numpy", "pickle", "zip", "npy", "magic", "dtype", "CRC", "Traceback", "central directory"):
        assert word not in message.replace(str(path), "")


def test_a_small_memory_is_read(path: Path) -> None:
    path.write_bytes(content())
    assert known(load_memory(path, MODEL), 3) == 3


def test_an_older_file_without_a_record_of_evidence_is_read(path: Path) -> None:
    path.write_bytes(content(ngram_evidence=None))
    assert known(load_memory(path, MODEL), 3) == 3


def test_unknown_arrays_of_older_files_are_ignored(path: Path) -> None:
    path.write_bytes(content(acceptance_weights=np.ones((3, 4)), acceptance_names=np.array(["nothing"])))
    memory = load_memory(path, MODEL)
    assert known(memory, 3) == 3
    save_memory(memory, path, MODEL)
    assert not [name for name in np.load(path).files if name.startswith("acceptance")]


def test_a_file_cut_short_at_any_byte_is_refused(path: Path) -> None:
    data = content()
    for length in range(0, len(data), 7):
        check_refused(path, data[:length])
    check_refused(path, data[:-1])


def test_a_byte_changed_anywhere_is_refused_or_of_no_account(path: Path) -> None:
    data = content()
    path.write_bytes(data)
    expected = load_memory(path, MODEL)
    for place in range(0, len(data), 11):
        changed = bytearray(data)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        try:
            loaded = load_memory(path, MODEL)
        except InvalidArgumentError:
            check_refused(path, bytes(changed))
        else:  # for example, the time of packing
            for name, array in memory_arrays(expected).items():
                assert np.array_equal(memory_arrays(loaded)[name], array)


def test_other_content_is_refused(path: Path) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 10, 1000):
        check_refused(path, rng.bytes(size), "no saved memory")
        check_refused(path, b"PK\x03\x04" + rng.bytes(size), "no saved memory")
    for array in (np.zeros(3), np.array([{}], dtype=object)):
        stream = io.BytesIO()
        np.save(stream, array)
        check_refused(path, stream.getvalue(), "no saved memory")


@pytest.mark.parametrize("name", [*np.load(io.BytesIO(content())).files])
def test_an_array_that_is_missing_or_another_is_refused(path: Path, name: str) -> None:
    array = np.load(io.BytesIO(content()))[name]
    missing = [] if name == "ngram_evidence" else [None]  # older files do not have it
    for other in (*missing, array[None], array.astype(np.complex64) if array.dtype.kind != "U" else np.array(3.5)):
        check_refused(path, content(**{name: other}))
    if array.ndim:
        check_refused(path, content(**{name: np.concatenate([array, array])}))
    if array.dtype.kind == "f":
        check_refused(path, content(**{name: np.full_like(array, np.nan)}))


class Trap:
    """An object that detects its unpickling."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize("name", ["format", "model", "ngram_sizes", "ngram_tags"])
def test_objects_are_never_unpickled(path: Path, name: str) -> None:
    check_refused(path, content(**{name: np.array([Trap()], dtype=object)}), "no saved memory")


def test_other_versions_and_models_are_refused(path: Path) -> None:
    check_refused(path, content(format=np.array(3)), "another version of this library")
    check_refused(path, content(format=np.array(3), ngram_sizes=None), "another version of this library")
    check_refused(path, content(model=np.array("the other")), r"another model \(the other\) than a model")


@pytest.mark.parametrize(
    "sizes", [(2, 1 << 50, 2), (1 << 50, 64, 2), (2, 64, 1 << 50), (-1, 64, 2), (2, 0, 2), (2, 60, 2)]
)
def test_sizes_are_checked_before_room_is_taken(path: Path, sizes: tuple[int, int, int]) -> None:
    check_refused(path, content(ngram_sizes=np.array([*sizes, 5])))


def test_a_shape_is_checked(path: Path) -> None:
    """A file of a few bytes declares an array of terabytes."""
    data, stream = content(), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            array = old.read(name)
            if name == "ngram_tags.npy":
                header = io.BytesIO()
                np.lib.format.write_array_header_1_0(
                    header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 44,)}
                )
                array = header.getvalue() + array[-40:]
            new.writestr(name, array)
    check_refused(path, stream.getvalue(), "no saved memory")


@pytest.mark.parametrize(
    ("name", "value"), [("ngram_slots", -1), ("ngram_slots", 10**6), ("ngram_stamps", 10**6), ("ngram_sizes", -1)]
)
def test_entries_in_impossible_places_are_refused(path: Path, name: str, value: int) -> None:
    array = np.load(io.BytesIO(content()))[name].copy()
    array[3] = value
    check_refused(path, content(**{name: array}), "no saved memory")
