"""How much of each draft a step sends, by what steps took and brought so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import RATE, DraftAccount, StepTime

_LEAST = 0.01
"""A token less likely than this is not sent, whatever it costs."""

_FIRST = 16
"""Drafted steps of a load that are all booked; of those after them every fourth is, for booking takes time."""

_BETWEEN = 32
"""Drafted steps at least between two rests."""

_PRIOR = 8.0
"""Tokens that count as accepted as often as expected beforehand."""

_FORGOTTEN = 0.02
"""What a step takes from the weight of those before it."""


class ChainLengths:
    """Sends the drafted tokens that are likely enough to pay for what they add to a step.

    A token that is accepted with probability p brings p tokens, and takes as long as it makes the step longer. In that
    time, the steps of this load bring so many tokens on the average. It is sent if p is more. That is what makes for
    the most tokens per second, and takes one comparison.

    Loads, of 1, 2, 4, 8, ... requests, have accounts of their own, which say whether drafting pays at all.

    Attributes:
        rests: Whether the coming step goes without drafts.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load = _Load()
        self._accepted = self._expected = _PRIOR
        self.rests = False

    def begin(self, rows: int) -> None:
        """Begin a step of so many requests."""
        key = 1 << max(rows - 1, 0).bit_length()
        if key not in self._loads:
            self._loads[key] = _Load()
        self._load = self._loads[key]
        self._load.account.rows = max(rows, 1)
        self.rests = self._load.rests

    def choose(self, likely: NDArray[np.float64]) -> int:
        """How many tokens of a draft are sent.

        Args:
            likely: How likely each is to be accepted with all before it, descending, `[drafted]`.
        """
        least = max(self._load.least * self._expected / self._accepted, _LEAST)
        return int(np.count_nonzero(likely >= least))

    def book(self, step: StepTime, expected: float) -> None:
        """Note what a step took and brought, of which `expected` drafted tokens were to be accepted.

        Args:
            step: Of the same requests as the step before, without prompts.
            expected: The sum of the probabilities of its drafted tokens.
        """
        if step.drafted:
            self._accepted += step.tokens - step.rows - _FORGOTTEN * (self._accepted - _PRIOR)
            self._expected += expected - _FORGOTTEN * (self._expected - _PRIOR)
        self._load.book(step)


class _Load:
    """What is known of steps of about so many requests."""

    def __init__(self) -> None:
        self.account = DraftAccount(CostModel.prior())
        self.least = 0.0
        self._tokens = self._seconds = 0.0  # of a drafted step, on the average
        self._steps = 0
        self._since = _BETWEEN  # how many drafted steps there were since the last plain one

    @property
    def rests(self) -> bool:
        """Whether drafting does not pay, or it is time to see what plain steps take."""
        return self.account.backs_off and (self._since == 0 or self._since >= _BETWEEN) and self._steps > 0

    def book(self, step: StepTime) -> None:
        """Note a step."""
        self._since = self._since + 1 if step.drafted else 0
        if not step.drafted:
            self.account.book(step)
            return
        self._steps += 1
        if self._steps > _FIRST and self._steps % 4:
            return
        self.account.book(step)
        rate = max(RATE, 1 / self._steps)
        self._tokens += rate * (step.tokens - self._tokens)
        usual = self.account.costs.step_time(step.nodes, step.context)
        self._seconds += rate * (usual + self.account.looking - self._seconds)
        # Over the upper half of the drafted tokens: beyond what was run, costs are guessed.
        drafted = (step.nodes - step.rows + 1) // 2
        if drafted:
            less = self.account.costs.step_time(step.nodes - drafted, step.context)
            self.least = (usual - less) / drafted * self._tokens / self._seconds
