"""Outcomes of cases, as text and as rows of a results file."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import torch

from compared.case import Case
from compared.outcome import BOTH_RAISE, EQUAL, KINDS, NEAR_TIE, NOT_BUILT, REFUSED, WRONG, Outcome, run_case
from lookahead.bench.rows import Row, RowsFile, describe_machine, kept_lines, versions


def report(outcomes: list[Outcome], table: str) -> str:
    """Return counts, families, reasons, and failures with commands to repeat them."""
    lines = _groups(outcomes)
    lines += _reasons("Not built", outcomes, NOT_BUILT)
    lines += _reasons("Refused", outcomes, REFUSED)
    lines += _reasons("Both raise, or plain alone", outcomes, BOTH_RAISE)
    for kind in (NEAR_TIE, WRONG):
        chosen = [outcome for outcome in outcomes if outcome.kind == kind]
        lines += ["", f"{kind}: {len(chosen)}"] if chosen else []
        lines += [line for outcome in chosen for line in describe(outcome, table)]
    tokens = sum(outcome.tokens for outcome in outcomes if outcome.kind == EQUAL)
    accepted = [length for outcome in outcomes for length in outcome.accepted]
    steps = f", {sum(accepted) / len(accepted):.2f} a step where steps were counted" if accepted else ""
    lines += ["", f"{tokens} tokens compared{steps}"]
    happened = sum((outcome.counts for outcome in outcomes), Counter[str]())
    lines += [", ".join(f"{count} {name}" for name, count in happened.items())] if happened else []
    for kind in sorted({outcome.case.kind for outcome in outcomes} - {""}):
        lines.append(_counted(kind, [outcome for outcome in outcomes if outcome.case.kind == kind]))
    return "\n".join([*lines, _counted("cases", outcomes)])


def describe(outcome: Outcome, table: str) -> list[str]:
    """Describe a failure, with the command that repeats it."""
    again = f"make fuzz SEED={outcome.case.seed}" + ("" if table == "all" else f" FUZZ={flag(table)}")
    return [f"  {again}   {outcome.kind}: {outcome.detail}", f"      {outcome.case.describe()}"]


def check(case: Case, table: str = "all") -> Outcome:
    """Run a case, and check that the outcome is equal."""
    outcome = run_case(case)
    assert outcome.kind == EQUAL, "\n".join([*describe(outcome, table), repr(case)])
    return outcome


def flag(table: str) -> str:
    """Return the command-line option of a table."""
    return f"--{table.replace(' ', '-')}"


def reason_not_to_run(outcome: Outcome) -> str:
    """Return the reason why a case was not run; empty if it ran."""
    return outcome.detail if outcome.kind in (NOT_BUILT, REFUSED) else ""


def _counted(name: str, outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in outcomes)
    return f"{len(outcomes)} {name}: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def _groups(outcomes: list[Outcome]) -> list[str]:
    """List the families with equal cases, and the others."""
    exact: Counter[str] = Counter()
    reasons: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        exact[outcome.case.family] += outcome.kind == EQUAL
        reasons[outcome.case.family] |= {outcome.kind} & {NOT_BUILT, REFUSED}
    covered = {name: count for name, count in exact.items() if count}
    listed = " ".join(f"{name}:{count}" for name, count in sorted(covered.items()))
    never = sorted(exact.keys() - covered)
    kinds = " ".join(f"{name}({' '.join(sorted(reasons[name])) or 'no equal case'})" for name in never)
    return [
        *(f"{len(covered)} families with equal cases (family:cases)", f"  {listed}"),
        *(f"{len(never)} without", f"  {kinds}"),
    ]


def _reasons(title: str, outcomes: list[Outcome], kind: str) -> list[str]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.kind == kind:
            groups[outcome.detail].append(outcome.case)
    lines = ["", f"{title}: {sum(map(len, groups.values()))}"] if groups else []
    for reason, group in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        names = sorted({case.family for case in group})
        some = " ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"  {len(group)} x {reason} [{some}; SEED={group[0].seed}]")
    return lines


class CaseRows:
    """Rows of a results file; a context manager that closes it.

    Args:
        path: The file, which is created or continued.
        table: Name of the cases' table.
    """

    def __init__(self, path: Path, table: str) -> None:
        lines = kept_lines(path, lambda row: row.get("kind") == "header")
        self._table = table
        self._file = RowsFile(path, lines or [_header()], lambda row: (row.get("of"), row.get("seed")))

    def __enter__(self) -> CaseRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(None, None, None)

    def __contains__(self, seed: int) -> bool:
        return (self._table, seed) in self._file

    def add(self, outcome: Outcome) -> None:
        """Write the outcome of a case."""
        self._file.append(_row(outcome, self._table))

    def equal(self) -> Counter[str]:
        """Return the number of equal cases, by family."""
        return Counter(row["family"] for row in self._rows() if row["kind"] == EQUAL)

    def reasons(self) -> dict[str, list[str]]:
        """Return the reasons why cases were not run, by family; an empty string for a case that ran."""
        found: dict[str, list[str]] = defaultdict(list)
        for row in self._rows():
            found[row["family"]].append(row["detail"] if row["kind"] in (NOT_BUILT, REFUSED) else "")
        return found

    def _rows(self) -> list[Row]:
        return [row for row in self._file.rows if row.get("of") == self._table]


def _row(outcome: Outcome, table: str) -> Row:
    """Return the row of a case; `sampled` and the following fields are true if any turn has the feature."""
    turns = outcome.case.turns
    return {
        "of": table,
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
    return {"kind": "header", "machine": machine, "versions": versions(), "date": date.today().isoformat()}
