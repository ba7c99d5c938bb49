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
"""Steps in a row for which no draft paid, after which drafting backs off."""

LONGEST_REST = 64
"""Steps after which drafting is tried again, at the latest."""


class StepCosts(Protocol):
    """Says what a step costs; `lookahead.core.cost_model.CostModel` does."""

    def step_time(self, nodes: NDArray[np.integer], context: int) -> NDArray[np.float64]:
        """Seconds, or any other unit, of steps of so many nodes after `context` tokens of text."""


class StepBudget(Protocol):
    """Decides how many candidates a step sends."""

    @property
    def backs_off(self) -> bool:
        """Whether the coming step goes without a draft, so that nothing need be offered or learned."""

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """Choose among the candidates of a step.

        Args:
            probabilities: Probability that each is accepted, the likeliest first, `[candidates]`.
            context: Tokens of text before the step.

        Returns:
            Whether more candidates, less likely than these, may be worth sending as well.
        """

    @property
    def chosen(self) -> int:
        """How many of the candidates that were offered last are sent, the likeliest ones."""

    @property
    def left(self) -> int:
        """Nodes that the step may have beside the root and the chosen candidates, for the window."""

    def learn(self, drafted: bool, accepted: bool) -> None:
        """Note how a step went: whether it had a draft, and whether any of it was accepted."""


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    backs_off = False

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least its root")
        self._nodes = nodes
        self.chosen = 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        self.chosen = min(len(probabilities), self._nodes - 1)
        return self.left > 0

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._nodes - 1 - self.chosen

    def learn(self, drafted: bool, accepted: bool) -> None:
        """See `StepBudget`."""


class ThroughputBudget:
    """Sends the candidates that make for the most tokens per second.

    n candidates of probabilities p1 >= p2 >= ... make a step of 1 + p1 + ... + pn tokens that takes the time of
    n + 1 nodes; the n with the best ratio is taken. Where no n beats a step without a draft for a while, drafting
    backs off, for twice as long each time, and is tried again.

    Args:
        costs: What steps cost.
        rows: Sequences that share each step. All of them send about as many nodes.
        most: Nodes of a step at most, the root included.
    """

    def __init__(self, costs: StepCosts, rows: int = 1, most: int = MOST_CHOSEN_NODES) -> None:
        self._costs = costs
        self._most = most - 1
        self._sizes = rows * np.arange(1, most + 1)
        self.chosen = 0
        self._idle = 0  # steps in a row for which nothing paid
        self._rest = 0  # steps that go without a draft from here
        self._pause = 1

    @property
    def backs_off(self) -> bool:
        """See `StepBudget`."""
        return self._rest > 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        probabilities = probabilities[: self._most]
        tokens = 1 + np.concatenate([[0.0], np.cumsum(probabilities)])
        seconds = self._costs.step_time(self._sizes, context)
        rates = tokens / seconds[: len(tokens)]
        rates[0] *= WORTHWHILE
        self.chosen = int(rates.argmax())
        if len(probabilities) in (0, self._most):
            return False
        # Were all that follow as likely as the last one, would any number of them pay?
        ahead = np.arange(1, len(seconds) - len(probabilities))
        return bool(((tokens[-1] + probabilities[-1] * ahead) / seconds[len(tokens) :]).max() > rates[self.chosen])

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._most - self.chosen

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
