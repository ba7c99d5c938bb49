"""Try versions of Python and of transformers, each in a new environment below build/versions.

    python tools/versions.py                          # what `make test-versions` tries
    python tools/versions.py --transformers newest --pythons none     # what continuous integration tries
    python tools/versions.py --transformers 5.17 5.20 --pythons 3.10  # some of them
    python tools/versions.py --output FILE            # rows into that file, for the table of docs/compatibility.md

In each environment all modules are imported, the snippets of the README are run, and 40 random cases are compared with
transformers' own `generate`. `oldest` and `newest` are the ends of the range in pyproject.toml, tried with the Python
that runs this file; other installed Pythons (of pyenv, uv or the system) are tried with `newest`. `latest` is the
newest release, even outside the range: it cannot fail the command, and a line reports whether the range can be widened.

Needs no package, so that any Python runs it. An environment is removed after its checks, unless one of them failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
OLDEST, NEWEST, LATEST = "oldest", "newest", "latest"
CASES = 40
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
_SAYS_VERSIONS = """
import json, numba, platform, torch, transformers
libraries = {library.__name__: library.__version__ for library in (transformers, torch, numba)}
print(json.dumps({"python": platform.python_version(), **libraries}))
"""


@dataclass(frozen=True)
class Project:
    """Version ranges in pyproject.toml.

    Attributes:
        pythons: Minor versions in its classifiers, `"3.10"` for example.
        transformers: Requirement of transformers, in pip's notation.
    """

    pythons: tuple[str, ...]
    transformers: str

    @classmethod
    def read(cls) -> Project:
        """Read the ranges of this checkout."""
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        pythons = tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text))
        return cls(pythons, re.findall(r'"(transformers>=[^"]+)"', text)[0])

    def requirement(self, version: str) -> str:
        """Return pip's requirement; `version` is `OLDEST`, `NEWEST`, `LATEST`, or the beginning of a number."""
        if version == OLDEST:
            version = re.findall(r">=([\d.]+)", self.transformers)[0]
        names = {NEWEST: self.transformers, LATEST: "transformers"}
        return names.get(version, f"transformers=={version}.*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the versions on the command line; return 1 if a version in the declared range failed."""
    project = Project.read()
    asked = _parse(project, arguments)
    own = ".".join(platform.python_version_tuple()[:2])
    tries = [(own, sys.executable, version) for version in asked.transformers]
    for name in asked.pythons:
        if name == own:  # tried already
            continue
        if found := interpreter(name):
            tries.append((name, found, NEWEST))
        else:
            print(f"python {name}: none here; `uv python install {name}` or `pyenv install {name}` brings one")
    failed = False
    for name, python, version in tries:
        if version == LATEST and _release(python, LATEST, project) == _release(python, NEWEST, project):
            print("transformers: the newest release is in the declared range")
            continue
        row = try_version(python, version, FOLDER / f"python{name}-{version}", project)
        print(_in_words(row), flush=True)
        if version == LATEST:
            print(_about_latest(row, project))
            continue
        failed |= not row["passed"]
        if asked.output:
            keep(row, asked.output)
    return int(failed)


def _parse(project: Project, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    versions = f"{OLDEST}, {NEWEST}, {LATEST}, or numbers such as 5.20"
    defaults = [OLDEST, NEWEST, LATEST]
    parser.add_argument("--transformers", nargs="+", default=defaults, metavar="VERSION", help=versions)
    parser.add_argument("--pythons", nargs="+", default=["all"], metavar="VERSION", help="all, none, or such as 3.10")
    parser.add_argument("--output", type=Path, help="file of rows; rows of the same versions are replaced")
    asked = parser.parse_args(arguments)
    named = {"all": list(project.pythons), "none": []}
    asked.pythons = named.get(asked.pythons[0], asked.pythons)
    return asked


def interpreter(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Path of a Python of that version that can make environments; `None` if there is none."""
    for path in _candidates(name, environment):
        code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
        try:
            said = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if said.returncode == 0 and said.stdout.strip() == name:
            return path
    return None


def _candidates(name: str, environment: Mapping[str, str]) -> Iterator[str]:
    folders = environment.get("PATH")
    if found := shutil.which(
        f"python{name}", path=folders
    ):  # maybe one of pyenv's shims, which fails if the version is not chosen
        yield found
    pyenv = Path(environment.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(map(str, pyenv.glob(f"versions/{name}.*/bin/python")), reverse=True)
    if uv := shutil.which("uv", path=folders):
        said = subprocess.run([uv, "python", "find", "--no-python-downloads", name], capture_output=True, text=True)
        if said.returncode == 0:
            yield said.stdout.strip()


def _release(python: str, version: str, project: Project) -> str:
    """Number of the release that pip would install; nothing is installed."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    call = [python, *_PIP, *options, project.requirement(version)]
    report = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    return str(report["install"][0]["metadata"]["version"])


def try_version(python: str, version: str, folder: Path, project: Project) -> dict[str, Any]:
    """Make an environment of `python` with that transformers, run the checks in it, and return their row."""
    environment = _environment(python, version, folder, project)
    row: dict[str, Any] = {"kind": "version", **json.loads(_run(environment, "-c", _SAYS_VERSIONS).stdout)}
    imports = _run(environment, "tests/support/import_all.py")
    snippets = _run(environment, "tests/support/run_readme.py")
    cases = folder / "cases.jsonl"
    fuzz = _run(environment, "tests/support/run_cases.py", "--equal", str(CASES), "--output", str(cases))
    row["modules"] = _number(r"(\d+) modules", imports.stdout)
    row["snippets"] = _number(r"(\d+) snippets", snippets.stdout) - _number(r", (\d+) failed", snippets.stdout)
    row.update(_count(cases))
    checks = {"imports": imports, "snippets": snippets, "exact cases": fuzz}
    for name, check in checks.items():
        if check.returncode:
            print(f"{name} failed:\n{(check.stdout + check.stderr)[-4000:]}")
    row["passed"] = not any(check.returncode for check in checks.values())
    row["date"] = date.today().isoformat()
    if row["passed"]:
        shutil.rmtree(folder)
    return row


def _environment(python: str, version: str, folder: Path, project: Project) -> Path:
    """Make a new environment, and return the path of its interpreter."""
    print(f"Installing {project.requirement(version)} for {python} into {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    bin_folder = "Scripts" if os.name == "nt" else "bin"
    inside = folder / bin_folder / "python"
    # torch by itself and first: asked for with others, the newest one comes, with gigabytes for CUDA where there are
    # builds for CPUs.
    subprocess.run([inside, *_PIP, "--constraint", "constraints.txt", "torch"], check=True, cwd=ROOT)
    declared = NEWEST if version == LATEST else version
    own = [project.requirement(declared), "--editable", ".[serve]"]
    subprocess.run([inside, *_PIP, "--upgrade", *own], check=True, cwd=ROOT)
    if version == LATEST:  # by itself, as pip refuses it beside a range that ends before it
        subprocess.run([inside, *_PIP, "--upgrade", "transformers"], check=True, cwd=ROOT)
    return inside


def _run(python: Path, *call: str) -> subprocess.CompletedProcess[str]:
    """Run a script as on a new machine: with no compiled loops and no findings of other runs."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(python.parent.parent / "cache"), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)
    return subprocess.run([python, *call], cwd=ROOT, env=variables, capture_output=True, text=True)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _count(cases: Path) -> dict[str, int]:
    """Count the outcomes of cases in a file of the fuzzer, and the compared tokens."""
    lines = cases.read_text(encoding="utf-8").splitlines() if cases.exists() else []
    rows = [row for row in map(json.loads, lines) if "seed" in row]
    kinds = Counter(row["kind"] for row in rows)
    tokens = sum(row["tokens"] for row in rows if row["kind"] == "equal")
    return {"equal": kinds["equal"], "wrong": kinds["WRONG"], "tokens": tokens}


def _in_words(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {row[name]}" for name in ("python", "transformers", "torch", "numba"))
    counts = f"{row['modules']} modules, {row['snippets']} snippets, {row['equal']} equal cases, {row['wrong']} wrong"
    return f"{'ok    ' if row['passed'] else 'FAILED'} {versions}: {counts}"


def _about_latest(row: dict[str, Any], project: Project) -> str:
    if row["passed"]:
        return f"transformers {row['transformers']} works: the range {project.transformers} can be widened"
    return f"transformers {row['transformers']} does not work yet: the range {project.transformers} has to stay"


def keep(row: dict[str, Any], path: Path) -> None:
    """Write a row into a file, replacing a row of the same versions; the file is sorted by versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = {_versions(kept): kept for kept in [*map(json.loads, lines), row]}
    path.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)), encoding="utf-8")


def _versions(row: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Minor versions of Python and transformers, as numbers that sort."""
    return tuple(_minor(row[name]) for name in ("python", "transformers"))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


if __name__ == "__main__":
    sys.exit(main())
