"""Compare lookahead decoding with `model.generate`, token by token, in many seeded random cases.

    python tests/support/run_exactness.py --cases 1000 --seed 0

The cases are spread evenly over all architectures of the model zoo. The last line reads
`1000 passed, 0 failed`; the exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from exactness import Case, Outcome, random_case, run_case
from lookahead.config import ENGINES
from lookahead.drafting import compile_loops
from model_zoo import ARCHITECTURES


def main() -> int:
    """Run the cases that the command line asks for."""
    compile_loops()  # no case is to go without drafts, as first ones might
    arguments = _parse()
    console = Console()
    by_architecture: dict[str, list[Outcome]] = {name: [] for name in arguments.architectures}
    with _progress(console) as progress:
        task = progress.add_task("", total=arguments.cases)
        for case in draw_cases(arguments.cases, arguments.seed, arguments.architectures):
            progress.update(task, description=f"{case.architecture:<{_name_width()}}")
            outcome = run_case(replace(case, engine=arguments.engine))
            by_architecture[case.architecture].append(outcome)
            if not outcome.matched:
                console.print(outcome.report(), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    console.print(_table(by_architecture))
    outcomes = [outcome for group in by_architecture.values() for outcome in group]
    failed = sum(not outcome.matched for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def draw_cases(count: int, seed: int, architectures: list[str]) -> Iterator[Case]:
    """Draw `count` cases, the architectures in turn.

    Each case has a random state of its own, so that it does not change with the number of cases or with the
    architectures beside it.
    """
    for number in range(count):
        turn, place = divmod(number, len(architectures))
        name = architectures[place]
        yield random_case(Random(f"{seed} {name} {turn}"), name)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=_positive, default=1000, help="how many cases to run (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=list(ARCHITECTURES),
        default=list(ARCHITECTURES),
        metavar="NAME",
        help="only these; all of the model zoo if not given",
    )
    parser.add_argument("--engine", choices=ENGINES, default="dynamic", help="how steps are run (default: dynamic)")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _name_width() -> int:
    return max(map(len, ARCHITECTURES))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _table(by_architecture: dict[str, list[Outcome]]) -> Table:
    table = Table("architecture", "cases", "matched", "tokens per step", "tokens", title="Exactness")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, outcomes in by_architecture.items():
        if outcomes:
            table.add_row(name, *_cells(outcomes))
    everything = [outcome for outcomes in by_architecture.values() for outcome in outcomes]
    table.add_section()
    table.add_row("all", *_cells(everything))
    return table


def _cells(outcomes: list[Outcome]) -> tuple[str, ...]:
    matched = sum(outcome.matched for outcome in outcomes)
    tokens = sum(len(outcome.got) for outcome in outcomes)
    steps = sum(len(outcome.accepted_lengths) for outcome in outcomes)
    compression = tokens / steps if steps else 0.0
    return str(len(outcomes)), str(matched), f"{compression:.2f}", str(tokens)


if __name__ == "__main__":
    sys.exit(main())
