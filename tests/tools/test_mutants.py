"""The sample of changes that `make mutants` tries, and the table of its results."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

import mutants
from covering import CoveringTests
from mutants import HUNG, KILLED, SURVIVED, Mutant


def test_files_and_tests_exist() -> None:
    assert all((mutants.ROOT / "src" / "lookahead" / file).is_file() for file in mutants.TARGETS)
    files = mutants.files_of(["core/test_walk.py", *mutants.TESTS])
    assert files[0] == "core/test_walk.py"
    assert all((mutants.ROOT / "tests" / file).is_file() for file in files)


def test_tests_of_a_line_begin_with_those_that_noticed_changes(tmp_path: Path) -> None:
    text = "def double(x):\n    if x:\n        y = 2\n        return y * x\n    return x\n"
    lines = {"2": ["a[1]", "a[2]", "b", "c"], "3": ["a[1]", "a[2]", "b"], "4": [""], "5": ["c"]}
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "b": 3.0, "c": 4.0}
    (tmp_path / "recorded").write_text(json.dumps({"seconds": seconds, "lines": {"double.py": lines}}))
    covering = CoveringTests([tmp_path / "recorded"])

    def tests(line: int, limit: float = 99, **noticed: int) -> list[str]:
        return covering.of_line("double.py", text, line, limit, Counter(noticed))

    assert tests(3) == ["a[1]", "b", "a[2]"]
    assert tests(3, b=1) == ["b", "a[1]", "a[2]"]
    assert tests(3, limit=4) == ["a[1]", "b"]
    assert tests(3, limit=0.5) == ["a[1]"]
    assert tests(4) == tests(2) == ["a[1]", "b", "c", "a[2]"]  # of its statement, or else of the `if`
    assert tests(5) == ["c"]
    assert covering.of_line("other.py", text, 1, 99, Counter()) == []


def test_a_change_counts_once_by_its_latest_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for line, results in {3: [SURVIVED, KILLED], 4: [SURVIVED], 5: [HUNG]}.items():
        for result in results:
            row = asdict(Mutant("core/walk.py", line, "AddNot", line, "x")) | {"result": result, "diff": ["-a", "+b"]}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = list(mutants.table(mutants.rows_of(path)))
    assert rows[2:4] == ["| `core/walk.py` | 3 | 2 (67 %) | 1 |", "| all | 3 | 2 (67 %) | 1 |"]
    assert rows[4:] == ["\ncore/walk.py:4\n-a\n+b"]


def test_changes_are_those_of_the_seed_and_change_behaviour() -> None:
    pytest.importorskip("cosmic_ray")
    first = mutants.sample(["core/walk.py"], 5, seed=1)
    assert first == mutants.sample(["core/walk.py"], 5, seed=1) != mutants.sample(["core/walk.py"], 5, seed=2)
    assert len({mutants.mutated(mutant) for mutant in first}) == 5
    assert mutants.original("core/walk.py") not in map(mutants.mutated, first)
