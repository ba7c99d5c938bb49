"""Compare lookahead decoding with `model.generate` in many seeded random cases.

    python tests/support/run_cases.py --cases 3000             # every family of models, cases 0 to 2999
    python tests/support/run_cases.py --seed 123               # one of them again, in words
    python tests/support/run_cases.py --only qwen3 --cases 50
    python tests/support/run_cases.py --running-states --equal 500
    python tests/support/run_cases.py --indexed --equal 200 --each
    python tests/support/run_cases.py --faults --cases 1000    # changed models, small vocabularies, own loops, ...
    python tests/support/run_cases.py --greedy --cases 1000    # and the other tables of `compared/tables.py`
    python tests/support/run_cases.py --images --equal 200 --output benchmarks/results/fuzz.jsonl

A case is made from one number alone. The last lines count what came of the cases; the exit code is 1 if any was wrong.
Interrupted with Ctrl-C, the report is about what was run so far. `--equal` runs as many cases as it takes for so many
to have been run and found equal. With `--output` each case is a row of a file at once, and cases that are in it count
and are not run again.
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
from compared.shrink import shrink
from compared.tables import TABLES, Table
from lookahead.drafting import compile_loops

SAME_REASON = 2
"""After how many cases with the same reason a family is left out."""


def main() -> int:
    """Run the cases that the command line asks for."""
    given = _parse()
    compile_loops()  # no case is to go without drafts, as first ones might
    table = TABLES[given.table]
    if given.seed is not None:
        return _again(given, table)
    each = table.names() if given.each else []
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        rows = stack.enter_context(CaseRows(given.output, given.table)) if given.output else None
        try:
            cases = draw_cases(given.seed_start, table, given.only)
            times = (given.seconds, given.limit)
            Run(given.table, given.cases, given.equal, each, *times, bool(given.only), rows).run(cases, outcomes)
        except KeyboardInterrupt:
            print("\ninterrupted")
    print(report(outcomes, given.table))
    return 1 if any(outcome.kind == WRONG for outcome in outcomes) else 0


def _again(given: argparse.Namespace, table: Table) -> int:
    case = table.draw(given.seed)
    if case is None:
        print(f"there is no case {given.seed} in this table")
        return 2
    outcome = table.judge(case)
    print("\n".join(describe(outcome, given.table)))
    if given.shrink and outcome.kind == WRONG:
        print("\n".join(["simplified:", *describe(shrink(outcome, table.judge), given.table)]))
    return 1 if outcome.kind == WRONG else 0


def draw_cases(start: int, table: Table, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases from number `start` on; those of families or kinds named in `only` alone if there are any."""
    cases = (case for number in count(start) if (case := table.draw(number)) is not None)
    return (case for case in cases if not only or {case.family, case.kind} & set(only))


@dataclass(frozen=True)
class Run:
    """Runs cases of a table; prints failures and progress.

    Attributes:
        table: Name of the table.
        cases: How many to run, if `equal` is not given.
        equal: How many have to be equal.
        each: Families each of which has to have so many; none if it is all together.
        seconds: After how much time to begin no other case.
        limit: Seconds that a case may take.
        chosen: Whether cases were chosen by name: then none is left out for the reasons of others.
        rows: Where outcomes go as well. Cases that are in it are left out.
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
        """Run as many of `cases` as are enough, each into `outcomes` as it is done."""
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
    """A case that takes longer than it may; no `Exception`, as what calls raise is compared."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in this thread after so much time."""

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
    """Whether cases were not run for one reason each time; `reasons` has an empty one for a case that was."""
    return len(reasons) >= SAME_REASON and len(set(reasons)) == 1 and reasons[0] != ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, table in TABLES.items():
        parser.add_argument(flag(name), dest="table", action="store_const", const=name, default="all", help=table.about)
    parser.add_argument("--cases", type=int, default=300, help="how many cases to run (default: 300)")
    parser.add_argument("--equal", type=int, help="how many cases have to be equal, instead of --cases")
    parser.add_argument("--each", action="store_true", help="--equal is of each family, not of all together")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="only cases of these families or kinds")
    parser.add_argument("--seed-start", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--seed", type=int, help="run the case with this number alone")
    parser.add_argument("--shrink", action="store_true", help="with --seed: look for a simpler case that fails")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so much time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a case may take (default: 600)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines: a row for each case, added at once")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the Makefile: models this small only lose by a second one
    logging.set_verbosity(logging.CRITICAL)  # transformers' remarks on odd settings
    logging.disable_progress_bar()
    sys.exit(main())
