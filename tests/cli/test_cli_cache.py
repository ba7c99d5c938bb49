"""`lookahead cache`: show and clear the library's files in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import run_program


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """The library's folder, in a cache that also has files of other programs."""
    folder = tmp_path / "lookahead-decoding"
    for name, size in {"loops-a/x.nbc": 1500, "loops-b/x.nbc": 500, "findings/x.json": 20, "cost/x.json": 999}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x" * size)
    (tmp_path / "of-others").write_text("stays")
    return folder


def lookahead_cache(command: str, own_folder: Path) -> str:
    """Run a command in a process with this cache; return what it prints."""
    ran = run_program("-m", "lookahead", "cache", command, XDG_CACHE_HOME=str(own_folder.parent))
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_each_kind_of_content_has_its_size(own_folder: Path) -> None:
    folder, *kinds = lookahead_cache("show", own_folder).splitlines()
    assert folder == str(own_folder)
    assert [" ".join(line.split()) for line in kinds] == [
        "2.0 kB compiled loops",
        "20 bytes trials",
        "999 bytes curves of step times",
    ]


def test_clear_removes_the_folder_and_nothing_else(own_folder: Path) -> None:
    assert lookahead_cache("clear", own_folder) == f"removed 3.0 kB in {own_folder}\n"
    assert [path.name for path in own_folder.parent.iterdir()] == ["of-others"]
    assert lookahead_cache("clear", own_folder) == f"removed 0 bytes in {own_folder}\n"


def test_a_cache_that_is_a_link_is_emptied_where_it_lies(own_folder: Path, tmp_path: Path) -> None:
    there = own_folder.rename(tmp_path / "there")
    own_folder.symlink_to(there)
    lookahead_cache("clear", own_folder)
    assert list(there.iterdir()) == []
    assert own_folder.readlink() == there


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_one_variable_moves_the_cache_on_every_system(tmp_path: Path, system: str) -> None:
    code = f"import sys; sys.platform = {system!r}; from lookahead.core.files import user_cache; print(user_cache())"
    for given in (str(tmp_path), "", "relative"):
        environment = os.environ | {"XDG_CACHE_HOME": given}
        found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()
        assert found == given if given == str(tmp_path) else os.path.isabs(found)
