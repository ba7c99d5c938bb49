"""Compare lookahead decoding with `model.generate` under the same seed, in many random mixes of settings.

    python tests/support/run_sampling.py --cases 500 --seed 0

Tokens and the random state after them must be the same. The cases are spread evenly over all settings that change
logits, on the demo model and the models of the zoo. The last line reads `500 passed, 0 failed`; the exit code is 1
if any case failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from random import Random

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging

from lookahead.drafting import compile_loops
from model_zoo import ARCHITECTURES
from sampling_exactness import DEMO, FAMILIES, SamplingCase, SamplingOutcome, random_sampling_case, run_sampling_case


def main() -> int:
    """Run the cases that the command line asks for."""
    compile_loops()  # no case is to go without drafts, as first ones might
    arguments = _parse()
    console = Console()
    by_family: dict[str, list[SamplingOutcome]] = {name: [] for name in arguments.families}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=arguments.cases)
        for case in draw_cases(arguments.cases, arguments.seed, arguments.families, arguments.model):
            progress.update(task, description=f"{case.family:<{max(map(len, FAMILIES))}}")
            outcome = run_sampling_case(case)
            by_family[case.family].append(outcome)
            if not outcome.matched:
                console.print(outcome.report(), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    console.print(_table(by_family))
    outcomes = [outcome for group in by_family.values() for outcome in group]
    failed = sum(not outcome.matched for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def draw_cases(count: int, seed: int, families: list[str], model: str | None = None) -> Iterator[SamplingCase]:
    """Draw `count` cases, the families in turn, on `model` if given.

    Each case has a random state of its own, so that it does not change with the number of cases or with the
    families beside it.
    """
    for number in range(count):
        turn, place = divmod(number, len(families))
        name = families[place]
        yield random_sampling_case(Random(f"{seed} {name} {turn}"), name, model)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=positive, default=500, help="how many cases to run (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=list(FAMILIES),
        metavar="NAME",
        help="only cases made for these settings; all if not given",
    )
    parser.add_argument(
        "--model",
        choices=[DEMO, *ARCHITECTURES],
        metavar="NAME",
        help=f"only this model, {DEMO!r} or one of the zoo; all if not given",
    )
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number of at least 1, as a type of `argparse`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def progress_bar(console: Console) -> Progress:
    """A bar that says what is being run, and disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _table(by_family: dict[str, list[SamplingOutcome]]) -> Table:
    table = Table("setting", "cases", "greedy", "matched", "tokens per step", "tokens", title="Sampling, seed for seed")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, outcomes in by_family.items():
        if outcomes:
            table.add_row(name, *_cells(outcomes))
    everything = [outcome for outcomes in by_family.values() for outcome in outcomes]
    table.add_section()
    for label, on_demo in (("demo model", True), ("zoo models", False)):
        chosen = [outcome for outcome in everything if (outcome.case.model == DEMO) is on_demo]
        table.add_row(label, *_cells(chosen))
    table.add_row("all", *_cells(everything))
    return table


def _cells(outcomes: list[SamplingOutcome]) -> tuple[str, ...]:
    greedy = sum(not outcome.case.do_sample for outcome in outcomes)
    matched = sum(outcome.matched for outcome in outcomes)
    tokens = sum(len(outcome.got) for outcome in outcomes)
    steps = sum(len(outcome.accepted_lengths) for outcome in outcomes)
    compression = tokens / steps if steps else 0.0
    return str(len(outcomes)), str(greedy), str(matched), f"{compression:.2f}", str(tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the Makefile: models this small only lose by a second one
    logging.set_verbosity_error()  # transformers' remarks on odd settings would tear the progress bar
    sys.exit(main())
