"""How many nodes a step sends: as many as were asked for, or as many as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.choosing import Costs, choose_for_one
from lookahead.core.draft_account import DraftAccount
from lookahead.errors import InvalidArgumentError

WORTHWHILE = 1.02
"""A draft must promise this many times the tokens per second of a step without one; estimates are not better."""

LEANING = 0.5
"""How far a step that promises less than usual goes by the usual rate. By that alone it would send the least that pays
now; but what more nodes teach the drafter, pays later."""

Send = Callable[[int], None]
"""Sends so many candidates, the likeliest ones."""


class StepBudget(Protocol):
    """Decides how many candidates a step sends."""

    @property
    def backs_off(self) -> bool:
        """Whether this step goes without a draft, so that nothing need be offered or learned."""

    @property
    def least(self) -> float:
        """How likely a candidate must be, by its prediction, to be looked for at all."""

    @property
    def reads_prompts(self) -> bool:
        """Whether the model's predictions inside a prompt are wanted, if this step carries one."""

    def begin(self) -> None:
        """Begin a step, which settles `backs_off`."""

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

    def when_chosen(self, send: Send) -> None:
        """Call `send` once it is settled how many that is: at once, or before the step is run."""

    @property
    def left(self) -> int:
        """Nodes that the step may have beside the root and the chosen candidates, for the window."""

    def learn(self, accepted: Sequence[int]) -> None:
        """Note which of the chosen candidates were accepted, by their places in what was offered."""


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    backs_off = False
    least = 0.0
    reads_prompts = True

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least its root")
        self._nodes = nodes
        self.chosen = 0

    def begin(self) -> None:
        """See `StepBudget`."""

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        self.chosen = min(len(probabilities), self._nodes - 1)
        return self.left > 0

    def when_chosen(self, send: Send) -> None:
        """See `StepBudget`."""
        send(self.chosen)

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._nodes - 1 - self.chosen

    def learn(self, accepted: Sequence[int]) -> None:
        """See `StepBudget`."""


class ThroughputBudget:
    """Sends the candidates that make for the most tokens per second.

    n candidates of probabilities p1 >= p2 >= ... make a step of 1 + p1 + ... + pn tokens that takes the time of
    n + 1 nodes. The n with the best ratio is taken; or, where that ratio is below the usual one, the n that loses the
    fewest tokens against a ratio between the two: a long text is decoded fastest if a step that has little to send is
    over soon. (Where the ratio is better than usual, more nodes would pay by the same reasoning. But the probabilities
    of long drafts are the least reliable ones.) The probabilities are believed as far as they were right so far, and
    whether a step drafts at all, the account decides by the clock.

    Args:
        account: What steps cost and drafts bring; rows that share a step share it, too. All of them send about as
            many nodes.
        most: Nodes of a step at most, the root included.
    """

    least = 0.0
    reads_prompts = True

    def __init__(self, account: DraftAccount, most: int = MOST_CHOSEN_NODES) -> None:
        self._account = account
        self._most = most - 1
        self._offered: NDArray[np.float64] = np.empty(0)
        self.chosen = 0
        self.backs_off = account.backs_off

    def begin(self) -> None:
        """See `StepBudget`."""
        self.backs_off = self._account.backs_off
        self.chosen = 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        account = self._account
        most = min(self._most, account.most_nodes // account.rows - 1)
        self._offered = probabilities[:most]
        costs = account.costs.table(account.rows * (most + 1))
        return self._choose(account.calibration.correct(self._offered), costs, context, account.rows, most)

    def _choose(self, likely: NDArray[np.float64], costs: Costs, context: int, rows: int, most: int) -> bool:
        """See `choose_for_one`."""
        known = self._account.idle_cost, WORTHWHILE, self._account.usual_rate, LEANING
        self.chosen, more = choose_for_one(likely, costs, context, rows, most, *known)
        return more

    def when_chosen(self, send: Send) -> None:
        """See `StepBudget`."""
        send(self.chosen)

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._most - self.chosen

    def learn(self, accepted: Sequence[int]) -> None:
        """See `StepBudget`."""
        if self.chosen:
            self._account.calibration.learn(self._offered[: self.chosen], accepted)
