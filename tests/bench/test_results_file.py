"""Files of rows: links stay links, only regular files are replaced, and errors name the file."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lookahead.bench.rows import RowsFile, kept_lines, read_lines
from lookahead.errors import InvalidArgumentError


def is_ours(row: dict[str, Any]) -> bool:
    return "id" in row


def open_rows(path: Path, rows: list[dict[str, Any]] | None = None) -> RowsFile:
    return RowsFile(path, rows or [], lambda row: row["id"])


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_one(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "elsewhere" / "rows.jsonl", tmp_path / "link.jsonl"
    target.parent.mkdir()
    if exists:
        target.write_text('{"id":1}\n')
        target.chmod(0o600)
    link.symlink_to(target)
    with open_rows(link, kept_lines(link, is_ours)) as file:
        file.append({"id": 2})
        file.drop([2])
        file.append({"id": 3})
    assert link.is_symlink()
    assert [row["id"] for row in read_lines(target)] == ([1, 3] if exists else [3])
    if exists:
        assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "elsewhere") == ["rows.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs devices of a Unix")
@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe", "folder"])
def test_irregular_files_are_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "output"
    if kind == "device":
        path = Path("/dev/full")
    elif kind == "link to a device":
        path.symlink_to("/dev/full")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = path.lstat()
    with pytest.raises(InvalidArgumentError, match=f"{path} is not a regular file"):
        kept_lines(path, is_ours)
    assert path.lstat().st_ino == before.st_ino
    assert path.lstat().st_mode == before.st_mode


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Simulate a full disk: no file of this process may grow beyond `size` bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def fill() -> None:
        with open_rows(path) as file:
            file.append({"id": 1})
            file.append({"id": 2, "text": "x" * 200})

    with files_end_at(100), pytest.raises(OSError, match=str(path)):
        fill()
    assert read_lines(path) == [{"id": 1}]  # without the partial line
    with files_end_at(2), pytest.raises(InvalidArgumentError, match=str(path)):
        open_rows(path, [{"id": 1}])
    assert read_lines(path) == [{"id": 1}]


def test_half_of_a_surrogate_pair_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"id": "\ud83d", "text": "€ \N{GRINNING FACE}"}
    with open_rows(path) as file:
        file.append(row)
    assert read_lines(path) == [row]
    assert json.loads(path.read_text(encoding="utf-8")) == row


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_compressed_rows_are_read_under_either_name_and_not_added_to(tmp_path: Path, name: str) -> None:
    path, compressed = tmp_path / name, tmp_path / "rows.jsonl.gz"
    compressed.write_bytes(gzip.compress(b'{"id":1}\n'))
    assert read_lines(path) == [{"id": 1}]
    with pytest.raises(InvalidArgumentError, match=f"run gunzip {compressed}"):
        kept_lines(path, is_ours, restart=True)
    compressed.write_bytes(b"no gzip at all")
    with pytest.raises(InvalidArgumentError, match=f"cannot read the results {compressed}"):
        read_lines(path)


THEIRS = {
    "one line without an end": b'{"theme": "dark"}',
    "one line": b'{"theme": "dark"}\n',
    "a list": b"[1, 2]\n",
    "many lines": b'{\n  "theme": "dark"\n}\n',
    "words": b"Dear diary,\n",
    "words without an end": b"Dear diary,",
    "half a row of ours": b'{"id": 1, "te',
    "an empty line": b"\n",
    "no text": b"\xff\x00" * 50,
}


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("content", THEIRS.values(), ids=THEIRS)
def test_files_that_do_not_begin_with_a_row_are_left_alone(tmp_path: Path, content: bytes, restart: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=f"{path} does not begin with a row"):
        kept_lines(path, is_ours, restart=restart)
    assert path.read_bytes() == content


def test_a_last_line_without_an_end_counts_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id":1}\n{"id":2}')
    assert kept_lines(path, is_ours) == [{"id": 1}, {"id": 2}]
    for half in ('{"id":2,"text":"€'.encode()[:-1], b'{"i', b"{"):  # cut in a character, in the key, after the bracket
        path.write_bytes(b'{"id":1}\n' + half)
        assert kept_lines(path, is_ours) == [{"id": 1}]
    path.write_bytes(b'{"id":1}\nremember: these are the good ones')
    with pytest.raises(InvalidArgumentError, match="line 2 is not a JSON object"):
        kept_lines(path, is_ours)


def test_the_first_row_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_rows(path) as file, files_end_at(20), pytest.raises(OSError, match=str(path)):
        file.append({"id": 1, "text": "x" * 200})
    assert path.read_bytes() == b""
