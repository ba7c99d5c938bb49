"""A rank is killed while it decodes; the others must end with an error that names it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from random import Random

import torch

import lookahead
from lookahead.parallel import ParallelGroup
from model_zoo import build
from parallel_team import Team

TIMEOUT = 20.0
"""Time-out of the groups, in seconds: so long a rank that is stopped is waited for."""


@dataclass
class KillOutcome:
    """What came of one kill.

    Attributes:
        ranks: How many ranks there were.
        victim: Which one was killed.
        seconds: How long each of the others went on.
        messages: What they ended with.
        problems: What was not as it must be.
    """

    ranks: int
    victim: int
    how: str
    seconds: list[float] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """In one line, more if there are problems."""
        message = self.messages[0] if self.messages else "no message"
        times = ", ".join(f"{seconds:.1f}" for seconds in self.seconds)
        lines = [f"rank {self.victim} of {self.ranks} ({self.how}): others ended after {times} s: {message}"]
        return "\n".join(lines + self.problems)


def decode_on(group: ParallelGroup, tokens: int) -> str:
    """Decode for a long time; the message of the error that ends it."""
    model = build("llama")
    prompt = torch.tensor([[3, 14, 15, 9, 2, 6]])
    config = lookahead.LookaheadConfig(preset="paper", window_size=6, ngram_size=4, guess_set_size=6)
    try:
        while True:
            lookahead.generate(
                model, prompt, lookahead_config=config, parallel=group, max_new_tokens=tokens, do_sample=False
            )
    except lookahead.ParallelError as error:
        return str(error)


def kill_once(random: Random, how: str | None = None) -> KillOutcome:
    """Kill one of 2 to 4 ranks, or stop it, at some time while they decode."""
    ranks = random.randint(2, 4)
    victim = random.randrange(ranks)
    how = how or random.choice(("killed", "killed", "stopped"))
    outcome = KillOutcome(ranks, victim, how)
    team = Team(ranks, TIMEOUT)
    try:
        team.begin(ranks, decode_on, 200)
        time.sleep(2 + 3 * random.random())
        pid = team.processes[victim].pid
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        begun = time.monotonic()
        for rank in range(ranks):
            if rank == victim:
                continue
            try:
                message = team.result(rank)
            except TimeoutError as error:
                outcome.problems.append(str(error))
                continue
            outcome.seconds.append(time.monotonic() - begun)
            outcome.messages.append(str(message))
            if f"rank {victim}" not in str(message):
                outcome.problems.append(f"rank {rank} does not name rank {victim}: {message}")
    finally:
        for process in team.processes:
            process.kill()
            process.join()
    return outcome
