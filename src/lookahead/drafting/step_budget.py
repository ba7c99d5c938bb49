"""How many nodes a step sends: as many as were asked for, or as many as pay."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.errors import InvalidArgumentError

WORTHWHILE = 1.02
"""A draft must promise this many times the tokens per second of a step without one; estimates are not better."""

PATIENCE = 8
"""Steps in a row for which no draft paid, after which drafting rests."""

LONGEST_REST = 64
"""Steps after which drafting is tried again, at the latest."""


class StepCosts(Protocol):
    """Says what a step costs; `lookahead.cost_model.CostModel` does."""

    def step_time(self, nodes: NDArray[np.integer], context: int) -> NDArray[np.float64]:
        """Seconds, or any other unit, of steps of so many nodes after `context` tokens of text."""


class StepBudget(Protocol):
    """Decides about the candidates of a step, which are offered one by one, the likeliest first."""

    @property
    def rests(self) -> bool:
        """Whether the coming step goes without a draft, so that nothing need be offered or learned."""

    def begin(self, context: int) -> None:
        """Begin a step after `context` tokens of text."""

    def offer(self, gain: float) -> bool:
        """Take a candidate into account that is accepted with probability `gain`, no larger than the one before.

        Returns:
            Whether it may be worth sending; if not, nor is any that would come after it.
        """

    def settle(self) -> int:
        """How many of the candidates offered are sent, the likeliest ones."""

    def learn(self, drafted: bool, accepted: bool) -> None:
        """Note how a step went: whether it had a draft, and whether any of it was accepted."""

    @property
    def left(self) -> int:
        """Nodes that the step may still have beside the root and the candidates, for the window."""


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    rests = False

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least its root")
        self._nodes = nodes
        self._offered = 0

    def begin(self, context: int) -> None:
        """See `StepBudget`."""
        self._offered = 0

    def offer(self, gain: float) -> bool:
        """See `StepBudget`."""
        if self._offered == self._nodes - 1:
            return False
        self._offered += 1
        return True

    def settle(self) -> int:
        """See `StepBudget`."""
        return self._offered

    def learn(self, drafted: bool, accepted: bool) -> None:
        """See `StepBudget`."""

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._nodes - 1 - self._offered


class PayingBudget:
    """Sends the candidates that make for the most tokens per second.

    n candidates of probabilities p1 >= p2 >= ... make a step of 1 + p1 + ... + pn tokens that takes the time of
    n + 1 nodes; the n with the best ratio is taken. Where no n beats a step without a draft for a while, drafting
    rests, for twice as long each time, and is tried again.

    Args:
        costs: What steps cost.
        rows: Sequences that share each step. All of them send about as many nodes.
        most: Nodes of a step at most, the root included.
    """

    def __init__(self, costs: StepCosts, rows: int = 1, most: int = MOST_CHOSEN_NODES) -> None:
        self._costs = costs
        self._rows = rows
        self._sizes = rows * np.arange(1, most + 1)
        self._rates = np.zeros(most)  # of time: 1 / seconds of a step of 1, 2, ... nodes
        self._tokens = 1.0
        self._offered = 0
        self._best = 0.0
        self._chosen = 0
        self._idle = 0  # steps in a row for which nothing paid
        self._rest = 0  # steps that go without a draft from here
        self._pause = 1

    @property
    def rests(self) -> bool:
        """See `StepBudget`."""
        return self._rest > 0

    def begin(self, context: int) -> None:
        """See `StepBudget`."""
        self._rates = 1 / self._costs.step_time(self._sizes, context)
        self._tokens, self._offered, self._chosen = 1.0, 0, 0
        self._best = WORTHWHILE * float(self._rates[0])

    def offer(self, gain: float) -> bool:
        """See `StepBudget`."""
        place = self._offered + 1
        if place >= len(self._rates):
            return False
        # Were all that follow as likely as this one, would any number of them pay?
        ahead = np.arange(1, len(self._rates) - self._offered)
        if float(((self._tokens + gain * ahead) * self._rates[place:]).max()) <= self._best:
            return False
        self._offered = place
        self._tokens += gain
        rate = self._tokens * float(self._rates[place])
        if rate > self._best:
            self._best, self._chosen = rate, place
        return True

    def settle(self) -> int:
        """See `StepBudget`."""
        return self._chosen

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return len(self._rates) - 1 - self._chosen

    def learn(self, drafted: bool, accepted: bool) -> None:
        """Note how a step went: whether it had a draft, and whether any of it was accepted."""
        if self._rest:
            self._rest -= 1
        elif accepted:
            self._idle, self._pause = 0, 1
        elif not drafted:
            self._idle += 1
            if self._idle >= PATIENCE:
                self._pause = min(2 * self._pause, LONGEST_REST)
                self._rest = self._pause
