"""How many nodes a step sends whose rows are those of many requests: one number for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError


class SharedBudget:
    """A number of nodes for each step, in equal parts for all of its rows.

    With as many rows as nodes there is nothing left to draft, so at full load drafting rests.

    Args:
        nodes: Nodes of a step over all rows, roots included. At least 1.

    Attributes:
        nodes: As given.
        rows: How many rows the coming step has; to be set before each step.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least a root")
        self.nodes = nodes
        self.rows = 1

    @property
    def share(self) -> int:
        """Nodes of each row, its root included."""
        return max(self.nodes // max(self.rows, 1), 1)


class RowBudget:
    """What one row takes of a `SharedBudget`; a `StepBudget`."""

    def __init__(self, shared: SharedBudget) -> None:
        self._shared = shared
        self._nodes = shared.share
        self.chosen = 0

    @property
    def backs_off(self) -> bool:
        """See `StepBudget`."""
        return self._shared.share == 1

    def begin(self) -> None:
        """See `StepBudget`."""
        self._nodes = self._shared.share
        self.chosen = 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        self.chosen = min(len(probabilities), self._nodes - 1)
        return self.left > 0

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._nodes - 1 - self.chosen

    def learn(self, accepted: Sequence[int]) -> None:
        """See `StepBudget`."""
