"""Check the environment that runs this file: imports, the README's snippets and 40 random cases.

python tools/versions.py                  # in each environment of tox.ini by `make test-versions`
python tools/versions.py --output FILE    # a row into that file, for the table of docs/compatibility.md
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
LIBRARIES = ("transformers", "torch", "numba")


def check(cases: int = 40) -> dict[str, Any]:
    """Run the checks, print the output of those that fail, and return their row."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "cases.jsonl")
        checks = {
            "imports": _run("import_all.py"),
            "snippets": _run("run_readme.py"),
            "exact cases": _run("run_cases.py", "--equal", str(cases), "--output", str(output)),
        }
        lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    for name, done in checks.items():
        if done.returncode:
            print(f"{name} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    rows = [row for row in map(json.loads, lines) if "seed" in row]
    kinds, snippets = Counter(row["kind"] for row in rows), checks["snippets"].stdout
    return {
        "kind": "version",
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "modules": _number(r"(\d+) modules", checks["imports"].stdout),
        "snippets": _number(r"(\d+) snippets", snippets) - _number(r", (\d+) failed", snippets),
        "equal": kinds["equal"],
        "wrong": kinds["WRONG"],
        "tokens": sum(row["tokens"] for row in rows if row["kind"] == "equal"),
        "passed": not any(done.returncode for done in checks.values()),
        "date": date.today().isoformat(),
    }


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(SUPPORT / name), *arguments]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def keep(row: dict[str, Any], path: Path) -> None:
    """Write a row into a file, replacing a row of the same versions; the file is sorted by versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = {_versions(kept): kept for kept in [*map(json.loads, lines), row]}
    path.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)), encoding="utf-8")


def _versions(row: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Minor versions of Python and transformers, as numbers that sort."""
    return tuple(tuple(map(int, re.findall(r"\d+", row[name])[:2])) for name in ("python", "transformers"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of rows; a row of the same versions is replaced")
    options = parser.parse_args(arguments)
    row = check()
    print(json.dumps(row))
    if options.output and row["passed"]:
        keep(row, options.output)
    return int(not row["passed"])


if __name__ == "__main__":
    sys.exit(main())
