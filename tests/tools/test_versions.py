"""Declared versions, the versions of tox.ini, and warnings about untried ones."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers

import lookahead.backends.transformers
from versions import keep

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


def requirement() -> str:
    """Return the range of transformers in pyproject.toml."""
    return re.findall(r'"(transformers>=[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]


def test_the_environments_are_those_of_the_declared_versions() -> None:
    names = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    text = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert "py3{" + ",".join(names) + "}" in text
    (oldest,) = re.findall(r"oldest: .* transformers==(5\.\d+)\.\*", text)
    assert requirement().startswith(f"transformers>={oldest},<5.")


def test_versions_outside_of_the_declared_range_are_warned_of_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    beginning, major, end = re.findall(r">=([\d.]+),<(\d+)\.(\d+)", requirement())[0]
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
