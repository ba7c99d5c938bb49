"""Atomic replacement of files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lookahead.core.files import replaced


def test_a_file_that_fails_half_way_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def half() -> None:
        with replaced(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"], "nothing else is left"


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_nothing_is_left_of_a_file_that_has_no_room(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with replaced(tmp_path / "file") as file:
            file.write("x" * 1000)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="has no such permissions and links")
def test_links_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    with replaced(link) as file:
        file.write("after \ud800")
    assert link.is_symlink()
    assert target.read_text() == "after \\ud800"
    assert target.stat().st_mode & 0o777 == 0o640
    with replaced(tmp_path / "new") as file:
        file.write("")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~mask
