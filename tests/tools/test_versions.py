"""Declared versions, the versions that `tools/versions.py` tries, and warnings about untried ones."""

from __future__ import annotations

import json
import platform
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers

import lookahead.backends.transformers
import versions
from versions import LATEST, NEWEST, OLDEST, Project, interpreter, keep

ROOT = Path(__file__).parents[2]
_WITHOUT_NUMBA = """
import importlib.util, sys
sys.abiflags = sys.argv[1]
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find(name, *rest)
import lookahead
"""


def _python(code: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)


def test_the_declared_pythons_are_3_10_to_3_14_and_the_ranges_are_read() -> None:
    project = Project.read()
    assert project.pythons == ("3.10", "3.11", "3.12", "3.13", "3.14")
    oldest = re.fullmatch(r"transformers==(5\.\d+)\.\*", project.requirement(OLDEST))
    assert oldest is not None
    assert project.requirement(NEWEST).startswith(f"transformers>={oldest[1]},<5.")
    assert project.requirement(LATEST) == "transformers"
    assert project.requirement("5.20") == "transformers==5.20.*"


def test_versions_outside_of_the_declared_range_are_warned_of_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    major, end = re.findall(r",<(\d+)\.(\d+)", Project.read().transformers)[0]
    beginning = Project.read().requirement(OLDEST).removeprefix("transformers==").removesuffix(".*")
    newest = f"{major}.{int(end) - 1}"
    all_said = {}
    for version in (f"{newest}.0", f"{beginning}.3", f"{major}.{end}.0.dev0", "5.16.1"):
        monkeypatch.setattr(transformers, "__version__", version)
        with warnings.catch_warnings(record=True) as caught:
            runpy.run_path(lookahead.backends.transformers.__file__)
        all_said[version] = [str(warning.message) for warning in caught]
    assert all_said == {
        f"{newest}.0": [],
        f"{beginning}.3": [],
        **{
            outside: [
                f"transformers {outside} is untested with this library: {beginning} to {newest} are known to work. "
                f"If a call fails, install one of them: pip install transformers=={newest}.*"
            ]
            for outside in (f"{major}.{end}.0.dev0", "5.16.1")
        },
    }


def test_a_free_threaded_python_without_numba_is_refused_in_one_sentence() -> None:
    message = _python(_WITHOUT_NUMBA, "t").stderr.splitlines()[-1]
    assert message.startswith("ImportError: lookahead needs numba, which is not installed and has no release for some")
    assert _python(_WITHOUT_NUMBA, "").returncode == 0


def test_the_python_that_runs_this_is_found_or_none_is(tmp_path: Path) -> None:
    name = ".".join(platform.python_version_tuple()[:2])
    shim = tmp_path / f"python{name}"  # belongs to another version
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    environment = dict.fromkeys(("PATH", "PYENV_ROOT"), str(tmp_path))
    assert interpreter(name, environment) is None
    (tmp_path / "versions" / f"{name}.1" / "bin").mkdir(parents=True)
    own = tmp_path / "versions" / f"{name}.1" / "bin" / "python"
    own.symlink_to(sys.executable)
    assert interpreter(name, environment) == str(own)
    assert interpreter("3.99", environment) is None


def _row(python: str, release: str, passed: bool = True) -> dict[str, object]:
    counts = {"modules": 3, "snippets": 5, "equal": 40, "wrong": 0, "tokens": 1}
    versions_ = {"python": python, "transformers": release, "torch": "2", "numba": "0"}
    return {"kind": "version", **versions_, **counts, "passed": passed}


def test_rows_are_replaced_and_sorted_by_their_versions(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "versions.jsonl"
    for python, release in [("3.10.1", "5.17.0"), ("3.9.1", "5.24.0"), ("3.10.4", "5.17.2"), ("3.10.1", "5.9.0")]:
        keep(_row(python, release), path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    order = [(row["python"], row["transformers"]) for row in rows]
    assert order == [("3.9.1", "5.24.0"), ("3.10.1", "5.9.0"), ("3.10.4", "5.17.2")]


def newest_is(release: str, monkeypatch: pytest.MonkeyPatch, passed: bool = True) -> None:
    """Let the newest release be that one, and whatever is tried pass or fail."""
    tried = {
        "_release": lambda _, version, project: release if version == LATEST else "5.24.0",
        "try_version": lambda *arguments: _row("3.11.1", release, passed),
    }
    for name, function in tried.items():
        monkeypatch.setattr(versions, name, function)


@pytest.mark.parametrize("passed", [True, False])
def test_a_release_outside_of_the_range_is_tried_and_fails_nothing(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    newest_is("5.99.0", monkeypatch, passed)
    output = tmp_path / "rows.jsonl"
    assert versions.main(["--transformers", LATEST, "--pythons", "none", "--output", str(output)]) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.startswith(
        "transformers 5.99.0 works: the range" if passed else "transformers 5.99.0 does not work yet"
    )
    assert not output.exists()
    assert versions.main(["--transformers", NEWEST, "--pythons", "none"]) == (0 if passed else 1)


def test_a_newest_release_inside_of_the_range_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest_is("5.24.0", monkeypatch)
    assert versions.main(["--transformers", LATEST, "--pythons", "none"]) == 0
    assert capsys.readouterr().out == "transformers: the newest release is in the declared range\n"
