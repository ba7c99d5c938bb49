"""What came of cases, as rows of a file of results."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import torch

from fuzz.outcome import EQUAL, NOT_BUILT, REFUSED, Outcome
from lookahead.bench.rows import Row, RowsFile, describe_machine, kept_lines
from lookahead.cli import process


class CaseRows:
    """The rows of a file; a context manager, which closes it.

    Args:
        path: The file; it is made if it is not there, and else goes on.
        of: From what the cases were drawn: `"running states"`, `"images"`, `"encoders"`, `"indexed"` or `"all"`.
    """

    def __init__(self, path: Path, of: str) -> None:
        kept = kept_lines(path, lambda row: row.get("kind") == "header")
        self._of = of
        self._file = RowsFile(path, kept or [_header()], lambda row: (row.get("of"), row.get("seed")))

    def __enter__(self) -> CaseRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(None, None, None)

    def __contains__(self, seed: int) -> bool:
        return (self._of, seed) in self._file

    def add(self, outcome: Outcome) -> None:
        """Write what came of a case."""
        self._file.append(row_of(outcome, self._of))

    def equal(self) -> Counter[str]:
        """How many cases of each family were equal."""
        return Counter(row["family"] for row in self._file.rows if row.get("of") == self._of and row["kind"] == EQUAL)

    def reasons(self) -> dict[str, list[str]]:
        """Of each family, why its cases were not run; empty for one that was."""
        found: dict[str, list[str]] = defaultdict(list)
        for row in self._file.rows:
            if row.get("of") == self._of:
                found[row["family"]].append(row["detail"] if row["kind"] in (NOT_BUILT, REFUSED) else "")
        return found


def reason_not_to_run(outcome: Outcome) -> str:
    """Why a case was not run; empty if it was."""
    return outcome.detail if outcome.kind in (NOT_BUILT, REFUSED) else ""


def row_of(outcome: Outcome, of: str) -> Row:
    """The row of a case; `sampled` and so on say what is in any of its turns."""
    turns = outcome.case.turns
    return {
        "of": of,
        "seed": outcome.case.seed,
        "family": outcome.case.family,
        "kind": outcome.kind,
        "detail": outcome.detail,
        "tokens": outcome.tokens,
        "sampled": any(turn.settings.get("do_sample", False) for turn in turns),
        "rows": max(len(turn.prompts) for turn in turns),
        "turns": len(turns),
        "caches": any(turn.cache for turn in turns),
        "ends": any({"eos", "criterion", "stop_strings"} & turn.settings.keys() for turn in turns),
    }


def _header() -> Row:
    machine = describe_machine(torch.device("cpu"))
    return {"kind": "header", "machine": machine, "versions": process.versions(), "date": date.today().isoformat()}
