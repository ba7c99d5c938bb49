"""How many candidates a step sends: as asked by drafters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError

Send = Callable[[int], None]
"""Sends so many candidates, the likeliest ones."""


class StepBudget(Protocol):
    """Decides how many candidates a step sends for one row."""

    @property
    def backs_off(self) -> bool:
        """Whether this step goes without a draft, so that nothing need be offered or learned."""

    @property
    def least(self) -> float:
        """Least predicted probability at which a candidate is searched for."""

    @property
    def most(self) -> int:
        """Most candidates that are sent; no more need be looked for."""

    @property
    def reads_prompts(self) -> bool:
        """Whether the model's predictions inside a prompt are wanted, if this step carries one."""

    def begin(self) -> None:
        """Begin a step, which settles the above."""

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """Choose among the candidates of a step.

        Args:
            likely: Probability that each is accepted, the likeliest first, `[candidates]`.
            send: Called with how many are sent: at once, or when other rows have offered theirs.
            pending: Nodes of the row without them.
        """


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.
        least: How likely a candidate must be.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    backs_off = False
    reads_prompts = True

    def __init__(self, nodes: int, least: float = 0.0) -> None:
        if nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least its root")
        self.most = nodes - 1
        self.least = least

    def begin(self) -> None:
        """See `StepBudget`."""

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`."""
        send(min(len(likely), self.most))
