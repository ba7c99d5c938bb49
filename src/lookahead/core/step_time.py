"""Time and outcome of a step, the input of a pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lookahead.core.results import StepResults
from lookahead.core.statistics import Seconds
from lookahead.core.step import Batch, Phase


class StepTime(NamedTuple):
    """Time and outcome of a step.

    Attributes:
        nodes: Nodes of the step over all rows.
        context: Longest text before the step, in tokens.
        seconds: Duration of the step.
        tokens: Tokens added to the texts, over all rows.
        rows: Rows with an unfinished text.
        drafted: Whether the step searched for a draft; otherwise it was a plain step.
        tells: Whether the step is a fair sample of decoding. It is not if it processed prompt tokens, could only
            complete texts, or added no token.
        certain_nodes: Nodes sent because one path through them is accepted whatever the model predicts. They are sent
            whether or not drafting rests, so they are left out of its balance.
        certain_tokens: Tokens of the accepted path through these nodes.
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
    """Timer of the steps of a batch; `mark` is the batch's `mark` callback.

    Args:
        clock: Clock for the pace, in seconds.
        wall: Clock for the time of each part of a step, in seconds.
        is_padded: Whether the backend pads the trees to the same size, instead of packing them one after another.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], is_padded: bool = True) -> None:
        self._clock = clock
        self._wall = wall
        self._is_padded = is_padded
        self._seconds = Seconds()
        self._start = self._since = 0.0
        self._context = 0
        self._completes = False

    def begin(self, batch: Batch) -> None:
        """Start timing a step."""
        self._seconds = batch.statistics.seconds
        self._context = 0
        self._completes = True
        for sequence in batch.sequences:
            length = len(sequence.tokens)
            self._context = max(self._context, length)
            self._completes &= sequence.finished or length + 1 >= sequence.most_tokens
        self._start, self._since = self._clock(), self._wall()

    def mark(self, phase: Phase) -> None:
        """Add the time since the previous mark to the part `phase` of the step."""
        now = self._wall()
        if phase == "watch":
            self._start += now - self._since  # watching does not count as time of the step
        else:
            vars(self._seconds)["draft" if phase == "learn" else phase] += now - self._since
        self._since = now

    def end(self, batch: Batch, results: StepResults | None, drafted: bool) -> StepTime:
        """Return the time and the outcome of a step.

        Args:
            batch: The batch.
            results: Results of the step; `None` after a plain step of one text without a tree.
            drafted: Whether the step searched for a draft.
        """
        if results is None:
            sequence = batch.sequences[0]
            tells = not self._completes and sequence.error is None and sequence.steps > 1
            return StepTime(1, self._context, self._clock() - self._start, 1, 1, drafted=False, tells=tells)
        forest = results.forest
        added = results.walks.counts.tolist()  # Python counts few numbers in less time than numpy
        going = len(added) - added.count(0)
        prompts = False
        for sequence, root in zip(batch.sequences, forest.roots.tolist(), strict=True):
            prompts |= root > 0 and (sequence.steps <= 1 or not self._is_padded)
        return StepTime(
            nodes=max(forest.counts.tolist()) * forest.rows if self._is_padded else len(forest.tokens),
            context=self._context,
            seconds=self._clock() - self._start,
            tokens=sum(added),
            rows=going,
            drafted=drafted,
            tells=going > 0 and not self._completes and not prompts,
            certain_nodes=sum([tree.certain for tree in forest]) if forest.has_certain else 0,
            certain_tokens=results.walks.certain_tokens,
        )
