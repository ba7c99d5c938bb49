"""What a step took and brought, for a pace to go by."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lookahead.core.protocols import StepResults
from lookahead.core.statistics import Seconds
from lookahead.core.step import Batch, Phase


class StepTime(NamedTuple):
    """Time and result of a step.

    Attributes:
        nodes: Its nodes over all rows.
        context: The longest text before it, in tokens.
        seconds: How long it took.
        tokens: Tokens that it added, over all rows.
        rows: Rows that were not finished.
        drafted: Whether a draft was looked for; without one it was a plain step.
        tells: Whether it says what drafts cost and bring: not if it carried tokens of prompts as well, completed all
            texts, so that there was nothing to draft, or added to none.
        certain_nodes, certain_tokens: How many of its nodes were sent because one way through them is accepted whatever
            the model says, and how many tokens that way had. They are sent whether or not drafting pays, and say
            nothing of it.
    """

    nodes: int
    context: int
    seconds: float
    tokens: int
    rows: int
    drafted: bool
    tells: bool = True
    certain_nodes: int = 0
    certain_tokens: int = 0


class StepTimer:
    """Times the steps of a batch: its `mark`.

    Args:
        clock: What a pace goes by, in seconds.
        wall: What is counted as time of each part of a step, likewise.
        packed: Whether the backend sends the trees one after another, instead of padding them to the same size.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], packed: bool = False) -> None:
        self._clock, self._wall, self._packed = clock, wall, packed
        self._seconds = Seconds()
        self._start = self._since = 0.0
        self._context = 0
        self._completes = False

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        sequences, self._seconds = batch.sequences, batch.statistics.seconds
        self._context = max(len(sequence.tokens) for sequence in sequences)
        self._completes = all(sequence.finished or sequence.is_last_token for sequence in sequences)
        self._start, self._since = self._clock(), self._wall()

    def mark(self, phase: Phase) -> None:
        """A part of it is over."""
        now = self._wall()
        if phase == "watch":
            self._start += now - self._since  # no part of the step
        else:
            part = "draft" if phase == "learn" else phase
            setattr(self._seconds, part, getattr(self._seconds, part) + now - self._since)
        self._since = now

    def end(self, batch: Batch, results: StepResults, drafted: bool) -> StepTime:
        """Time and tokens of the step; `drafted`: see `StepTime`."""
        forest = results.forest
        walks = [walk for walk in results.walks if walk is not None]
        prompts = bool(forest.roots.any()) and any(
            tree.root > 0 and (self._packed or sequence.steps <= 1)
            for sequence, tree in zip(batch.sequences, forest, strict=True)
        )
        return StepTime(
            nodes=len(forest.tokens) if self._packed else int(forest.counts.max()) * len(forest),
            context=self._context,
            seconds=self._clock() - self._start,
            tokens=sum(len(walk.tokens) for walk in walks),
            rows=len(walks),
            drafted=drafted,
            tells=bool(walks) and not self._completes and not prompts,
            certain_nodes=sum(tree.certain for tree in forest),
            certain_tokens=sum(walk.certain_tokens for walk in walks),
        )
