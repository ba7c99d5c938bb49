"""End ranks during decoding: kill one of them, or signal their parent process.

    python tests/support/run_parallel.py --kills 20 --signals 5 --seed 0

After a kill, the other ranks must end with an error that names the killed rank; after a signal, all must end quietly.
First, two copies of a model, each on two ranks, are compared with one process. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import signal
import sys
import time
from random import Random

import torch

from compared.ranks import decode_for_ever, decode_on_copies
from parallel_signals import PHASES, SIGNALS, signal_once
from parallel_team import Team

TIMEOUT = 20.0
"""Timeout of the groups, in seconds; a rank that does not answer by then counts as failed."""


def main() -> int:
    """Run the trials of the command line."""
    options = _parse()
    torch.set_num_threads(1)
    return 1 if _tensor_parallel() + _kill(options.kills, options.seed) + _signal(options.signals) else 0


def _tensor_parallel() -> int:
    """Compare two copies of a model, each on two ranks, with one process."""
    team = Team(4)
    expected = decode_on_copies(None)
    got = team.run(4, decode_on_copies)
    team.close()
    failed = sum(texts != expected for texts in got)
    print(f"tensor parallelism on 2 x 2 ranks: {4 - failed} ranks passed, {failed} failed", *(got if failed else ()))
    return failed


def _kill(kills: int, seed: int) -> int:
    """Return the number of `kills` with problems."""
    longest, failed = 0.0, 0
    for number in range(kills):
        seconds, problems = kill_once(Random(f"{seed} kill {number}"))
        longest = max(longest, seconds)
        failed += bool(problems)
        print(f"kill {number + 1}: the others ended after {seconds:.1f} s", *problems, sep="\n", flush=True)
    print(f"{kills - failed} of {kills} kills: the others ended with an error that names it, {longest:.1f} s at most")
    return failed


def kill_once(random: Random) -> tuple[float, list[str]]:
    """Kill or stop one of 2 to 4 ranks at a random time during decoding.

    Returns:
        Seconds until the last other rank ended, and the problems.
    """
    ranks = random.randint(2, 4)
    victim, how = random.randrange(ranks), random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    team, seconds, problems = Team(ranks, TIMEOUT), 0.0, []
    try:
        team.begin(ranks, decode_for_ever)
        time.sleep(2 + 3 * random.random())
        os.kill(team.processes[victim].pid, how)
        begun = time.monotonic()
        for rank in range(ranks):
            if rank == victim:
                continue
            try:
                message = team.result(rank)
            except TimeoutError as error:
                message = error
            seconds = time.monotonic() - begun
            if f"rank {victim}" not in str(message) or isinstance(message, TimeoutError):
                problems.append(f"rank {rank} does not name rank {victim} of {ranks} ({how.name}): {message}")
    finally:
        for process in team.processes:
            process.kill()
            process.join()
    return seconds, problems


def _signal(repeats: int) -> int:
    """Return the number of signals, of all kinds and in all phases, with problems."""
    longest, failed, count = 0.0, 0, 0
    for phase in PHASES:
        for name in SIGNALS:
            for _ in range(repeats):
                taken, problems = signal_once(name, phase)
                longest, count = max(longest, taken), count + 1
                failed += bool(problems)
                print(f"{name} while {phase}: all ended after {taken:.2f} s", *problems, sep="\n", flush=True)
    print(f"{count - failed} of {count} signals: all ranks ended quietly, after {longest:.2f} s at most")
    return failed


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20, help="how many times to kill a rank (default: 20)")
    parser.add_argument("--signals", type=int, default=5, help="repeats of each signal in each phase (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
