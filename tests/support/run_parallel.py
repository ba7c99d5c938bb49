"""Compare lookahead decoding on several ranks with one process in many seeded random cases, and end ranks.

    python tests/support/run_parallel.py --cases 200 --kills 20 --signals 5 --seed 0

The cases go in turn over 1, 2, 3 and 4 ranks, and over greedy decoding, sampling and ragged batches. The last lines
read `200 passed, 0 failed`, `20 of 20 kills ...` and `150 of 150 signals ...`; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections import Counter
from random import Random

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parallel_exactness import compare, decode_on_copies, random_parallel_case
from parallel_kill import kill_once
from parallel_signals import PHASES, SIGNALS, signal_once
from parallel_team import Team


def main() -> int:
    """Run what the command line asks for."""
    arguments = _parse()
    torch.set_num_threads(1)
    console = Console()
    failed = _compare(console, arguments.cases, arguments.seed) if arguments.cases else 0
    failed += _tensor_parallel() if arguments.cases else 0
    failed += _kill(console, arguments.kills, arguments.seed) if arguments.kills else 0
    failed += _signal(arguments.signals)
    return 1 if failed else 0


def _compare(console: Console, cases: int, seed: int) -> int:
    """Failures among `cases` comparisons."""
    passed: Counter[tuple[int, str]] = Counter()
    failed = 0
    team = Team(4)
    with _progress(console) as progress:
        task = progress.add_task("cases", total=cases)
        for number in range(cases):
            case = random_parallel_case(Random(f"{seed} {number}"), number)
            problems = compare(team, case)
            for problem in problems:
                console.print(problem, markup=False, highlight=False, soft_wrap=True)
            failed += bool(problems)
            passed[case.ranks, type(case.case).__name__] += not problems
            progress.advance(task)
    team.close()
    for (ranks, kind), count in sorted(passed.items()):
        print(f"{ranks} ranks, {kind}: {count} passed")
    print(f"{cases - failed} passed, {failed} failed")
    return failed


def _tensor_parallel() -> int:
    """Two copies of a model, each on two ranks, against one process."""
    team = Team(4)
    wanted = decode_on_copies(None)
    got = team.run(4, decode_on_copies)
    team.close()
    failed = sum(texts != wanted for texts in got)
    print(f"tensor parallelism on 2 x 2 ranks: {4 - failed} ranks passed, {failed} failed", *(got if failed else ()))
    return failed


def _kill(console: Console, kills: int, seed: int) -> int:
    """How many of `kills` did not end as they must."""
    seconds, failed = [], 0
    for number in range(kills):
        outcome = kill_once(Random(f"{seed} kill {number}"))
        seconds += outcome.seconds
        failed += bool(outcome.problems)
        print(f"kill {number + 1}: {outcome.describe()}", flush=True)
    longest = max(seconds, default=0.0)
    print(f"{kills - failed} of {kills} kills: the others ended with an error that names it, {longest:.1f} s at most")
    return failed


def _signal(repeats: int) -> int:
    """How many signals, of every kind and in every phase, did not end all ranks as they must."""
    seconds, failed = [], 0
    for phase in PHASES:
        for name in SIGNALS:
            for _ in range(repeats):
                taken, problems = signal_once(name, phase)
                seconds.append(taken)
                failed += bool(problems)
                print(f"{name} while {phase}: all ended after {taken:.2f} s", *problems, sep="\n", flush=True)
    if seconds:
        count = len(seconds)
        print(f"{count - failed} of {count} signals: all ranks ended quietly, after {max(seconds):.2f} s at most")
    return failed


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=200, help="how many cases to compare (default: 200)")
    parser.add_argument("--kills", type=int, default=20, help="how many times to kill a rank (default: 20)")
    parser.add_argument("--signals", type=int, default=5, help="repeats of each signal in each phase (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
