"""The sample of changes that `make mutants` tries, and the table of its results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import mutants
from mutants import HUNG, KILLED, SURVIVED, Mutant


def test_files_and_tests_exist() -> None:
    for file, tests in mutants.TARGETS.items():
        assert (mutants.ROOT / "src" / "lookahead" / file).is_file()
        assert all((mutants.ROOT / "tests" / test).exists() for test in tests)
    assert all((mutants.ROOT / "tests" / test).exists() for test in mutants.BROAD)


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
