"""Compare batches of lookahead decoding with those of `model.generate` and with their own rows alone.

    python tests/support/run_batches.py --cases 300 --seed 0
    python tests/support/run_batches.py --cases 1000 --sampled

With `--sampled` rows are sampled, and must be those of `model.generate` under the same seed. The cases are spread
evenly over all architectures of the model zoo. The last line reads `300 passed, 0 failed`; the exit code is 1 if any
case failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from batch_exactness import BatchCase, BatchOutcome, random_batch_case, random_sampled_case, run_batch_case
from lookahead.drafting import compile_loops
from model_zoo import ARCHITECTURES
from run_sampling import positive, progress_bar


def main() -> int:
    """Run the cases that the command line asks for."""
    compile_loops()  # no case is to go without drafts, as first ones might
    arguments = _parse()
    console = Console()
    by_architecture: dict[str, list[BatchOutcome]] = {name: [] for name in arguments.architectures}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=arguments.cases)
        for case in draw_cases(arguments.cases, arguments.seed, arguments.architectures, arguments.sampled):
            progress.update(task, description=f"{case.architecture:<{max(map(len, ARCHITECTURES))}}")
            outcome = run_batch_case(case)
            by_architecture[case.architecture].append(outcome)
            if not outcome.matched:
                console.print(outcome.report(), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    console.print(_table(by_architecture))
    outcomes = [outcome for group in by_architecture.values() for outcome in group]
    failed = sum(not outcome.matched for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def draw_cases(count: int, seed: int, architectures: list[str], sampled: bool = False) -> Iterator[BatchCase]:
    """Draw `count` cases, the architectures in turn.

    Each case has a random state of its own, so that it does not change with the number of cases or with the
    architectures beside it.
    """
    for number in range(count):
        turn, place = divmod(number, len(architectures))
        name = architectures[place]
        yield (random_sampled_case if sampled else random_batch_case)(Random(f"{seed} {name} {turn}"), name)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=positive, default=300, help="how many cases to run (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    parser.add_argument("--sampled", action="store_true", help="sample the rows")
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=list(ARCHITECTURES),
        default=list(ARCHITECTURES),
        metavar="NAME",
        help="only these; all of the model zoo if not given",
    )
    return parser.parse_args()


def _table(by_architecture: dict[str, list[BatchOutcome]]) -> Table:
    table = Table("architecture", "cases", "checks", "matched", "tokens per step", "tokens", title="Batches")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, outcomes in by_architecture.items():
        if outcomes:
            table.add_row(name, *_cells(outcomes))
    everything = [outcome for outcomes in by_architecture.values() for outcome in outcomes]
    table.add_section()
    table.add_row("all", *_cells(everything))
    return table


def _cells(outcomes: list[BatchOutcome]) -> tuple[str, ...]:
    checks = sum(outcome.checks for outcome in outcomes)
    matched = sum(outcome.matched for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    steps = sum(len(outcome.accepted_lengths) for outcome in outcomes)
    compression = tokens / steps if steps else 0.0
    return str(len(outcomes)), str(checks), str(matched), f"{compression:.2f}", str(tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the Makefile: models this small only lose by a second one
    logging.set_verbosity_error()  # transformers' remarks on odd settings would tear the progress bar
    sys.exit(main())
