"""Compare lookahead decoding with `model.generate` in many seeded random cases.

    python tests/support/run_cases.py --cases 3000             # every family of models, cases 0 to 2999
    python tests/support/run_cases.py --seed 123               # one of them again, with a description
    python tests/support/run_cases.py --only qwen3 --cases 50
    python tests/support/run_cases.py --running-states --equal 500
    python tests/support/run_cases.py --indexed --equal 200 --each
    python tests/support/run_cases.py --faults --cases 1000    # changed models, small vocabularies, own loops, ...
    python tests/support/run_cases.py --greedy --cases 1000    # and the other tables of `compared/tables.py`
    python tests/support/run_cases.py --images --equal 200 --output benchmarks/results/fuzz.jsonl

The number of a case determines it. The last lines count the outcomes; the exit code is 1 if any is wrong. After
Ctrl-C, the report covers the cases so far. `--equal` runs cases until this number is equal. With `--output`, each
case is written to a file at once; cases in the file count and are not run again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from transformers.utils import logging

from compared.case import Case
from compared.outcome import EQUAL, WRONG, Outcome
from compared.report import CaseRows, describe, flag, reason_not_to_run, report
from compared.tables import TABLES, Table
from lookahead.drafting import compile_loops

SAME_REASON = 2
"""A family is dropped after this number of cases with the same reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases of the command line."""
    options = _parse(arguments)
    compile_loops()  # otherwise the first cases may have no drafts
    table = TABLES[options.table]
    if options.seed is not None:
        return _again(options, table)
    each = table.names() if options.each else []
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        rows = stack.enter_context(CaseRows(options.output, options.table)) if options.output else None
        try:
            cases = draw_cases(options.seed_start, table, options.only)
            counts, times = (options.cases, options.equal, each), (options.seconds, options.limit)
            Run(options.table, *counts, *times, bool(options.only), rows).run(cases, outcomes)
        except KeyboardInterrupt:
            print("\ninterrupted")
    print(report(outcomes, options.table))
    return 1 if any(outcome.kind == WRONG for outcome in outcomes) else 0


def _again(options: argparse.Namespace, table: Table) -> int:
    case = table.draw(options.seed)
    if case is None:
        print(f"there is no case {options.seed} in this table")
        return 2
    outcome = table.judge(case)
    print("\n".join(describe(outcome, options.table)))
    return 1 if outcome.kind == WRONG else 0


def draw_cases(start: int, table: Table, only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the cases from number `start` on; if `only` is not empty, only cases of these families or kinds."""
    cases = (case for number in count(start) if (case := table.draw(number)) is not None)
    return (case for case in cases if not only or {case.family, case.kind} & set(only))


@dataclass(frozen=True)
class Run:
    """Run cases of a table, and print failures and progress.

    Attributes:
        table: Name of the table.
        cases: Number of cases, without `equal`.
        equal: Required number of equal cases.
        each: Families that each need `equal` cases; empty if the number is a total.
        seconds: Time limit for the start of a case.
        limit: Time limit of a case, in seconds.
        chosen: Whether cases were selected by name; then no family is dropped.
        rows: File for the outcomes. Cases in it are skipped.
    """

    table: str
    cases: int = 300
    equal: int | None = None
    each: Sequence[str] = ()
    seconds: float = float("inf")
    limit: float = 600.0
    chosen: bool = False
    rows: CaseRows | None = None

    def run(self, cases: Iterator[Case], outcomes: list[Outcome]) -> None:
        """Run `cases` until there are enough, and append each outcome to `outcomes`."""
        begin, rows = time.monotonic(), self.rows
        skips = bool(TABLES[self.table].names()) and not self.chosen
        reasons: dict[str, list[str]] = defaultdict(list) if rows is None else rows.reasons()
        equal = Counter() if rows is None else rows.equal()
        for case in cases:
            if self._is_enough(len(outcomes), equal) or time.monotonic() - begin > self.seconds:
                break
            if (rows is not None and case.seed in rows) or self._has_enough(equal, case.family):
                continue
            if skips and _is_hopeless(reasons[case.family]):
                continue
            outcome = self._outcome(case)
            outcomes.append(outcome)
            equal[case.family] += outcome.kind == EQUAL
            if rows is not None:
                rows.add(outcome)
            reasons[case.family].append(reason_not_to_run(outcome))
            if outcome.kind == WRONG:
                print("\n".join(describe(outcome, self.table)), flush=True)
            if len(outcomes) % 100 == 0:
                kinds = Counter(outcome.kind for outcome in outcomes)
                counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
                print(f"{len(outcomes)} cases, {time.monotonic() - begin:.0f} s: {counts}", flush=True)

    def _outcome(self, case: Case) -> Outcome:
        try:
            with _time_limit(self.limit):
                return TABLES[self.table].judge(case)
        except TooLong as error:
            return Outcome(case, WRONG, str(error))

    def _is_enough(self, ran: int, equal: Counter[str]) -> bool:
        if self.equal is None:
            return ran >= self.cases
        if self.each:
            return all(self._has_enough(equal, family) for family in self.each)
        return equal.total() >= self.equal

    def _has_enough(self, equal: Counter[str], family: str) -> bool:
        return family in self.each and self.equal is not None and equal[family] >= self.equal


class TooLong(BaseException):
    """A case exceeded its time; not an `Exception`, as exceptions of calls are compared."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in this thread after `seconds`."""

    def end(*_: object) -> None:
        raise TooLong(f"it was not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_hopeless(reasons: list[str]) -> bool:
    """Return whether all cases were skipped for the same reason; `reasons` has an empty one for a case that ran."""
    return len(reasons) >= SAME_REASON and len(set(reasons)) == 1 and reasons[0] != ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, table in TABLES.items():
        parser.add_argument(flag(name), dest="table", action="store_const", const=name, default="all", help=table.about)
    parser.add_argument("--cases", type=int, default=300, help="how many cases to run (default: 300)")
    parser.add_argument("--equal", type=int, help="how many cases have to be equal, instead of --cases")
    parser.add_argument("--each", action="store_true", help="--equal is of each family, not of all together")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="only cases of these families or kinds")
    parser.add_argument("--seed-start", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--seed", type=int, help="run the case with this number alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so much time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a case may take (default: 600)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines: a row for each case, added at once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the Makefile: a second thread makes tiny models slower
    logging.set_verbosity(logging.CRITICAL)  # silences transformers' remarks on odd settings
    logging.disable_progress_bar()
    sys.exit(main())
