"""Node budget of a step for many requests: send the likeliest candidates of all rows, as many as make it faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.pace import TAUGHT, Pace
from lookahead.core.ranking import UNRANKED, new_ranking
from lookahead.core.roots import Roots
from lookahead.core.step_time import StepTime


class SharedPace:
    """Step budget (`StepBudget`) of all rows: their candidates compete for the nodes of one step.

    Candidates of all rows are sorted together, likeliest first, so a confident draft displaces another row's guesses. A
    full step gets no drafts. Each load and each temperature has its own `Pace`, because the best number for
    two rows is wrong for fifty, and the best for greedy rows is wrong for sampled ones.

    Args:
        first: Factory of the pace for a load (1, 2, 4, 8, ... rows) and a temperature (0, 0.5, 1, ...).
        nodes: Fixed number of nodes of a step over all rows, roots included; by default the pace chooses.

    Attributes:
        backs_off: Whether the coming step has no draft.
        min_probability: Minimum probability of a candidate that is searched for.
        rows: Number of rows of the step.
        ranking: Candidates of the step; see `new_ranking`.
    """

    is_shared = True

    def __init__(self, first: Callable[[int, float], Pace], nodes: int | None = None) -> None:
        self.backs_off = True
        self.min_probability = 0.0
        self.rows = 0
        self.ranking = UNRANKED
        self._first = first
        self._nodes = nodes
        self._paces: dict[tuple[int, float], Pace] = {}
        self._pace: Pace | None = None
        self._teaching = 0  # rows of the step that learn from the predictions after their nodes

    def budget_of_text(self, resends: bool, max_nodes: int) -> SharedPace:
        """Return the budget of all texts."""
        return self

    def begin_step(self, rows: int, temperature: float = 0.0) -> None:
        """Begin a step of `rows` rows with this mean sampling temperature."""
        self.rows = rows
        self._teaching = 0
        if self._nodes is not None:
            self.backs_off = self._nodes <= rows
            return
        self._pace = pace = self._of_load(1 << max(rows - 1, 0).bit_length(), round(2 * temperature) / 2)
        pace.begin_step(rows)
        self.backs_off = pace.rests
        self.min_probability = pace.min_probability(rows) / 2
        self.ranking = new_ranking(self._room)  # fixed nodes have none: recent predictions break its order

    def _of_load(self, load: int, temperature: float) -> Pace:
        """Return the pace of a load; a new one starts from the costs of the nearest known load.

        Requests join and leave, so a load would often end before it had learned its own costs.
        """
        key = load, temperature
        if key not in self._paces:
            calibrated = [
                (abs(log2(other / load)), other)
                for (other, like), pace in self._paces.items()
                if like == temperature and not pace.is_new
            ]
            pace = self._first(load, temperature)
            if calibrated and pace.is_new:
                pace = self._paces[min(calibrated)[1], temperature].similar(load)
            self._paces[key] = pace
        return self._paces[key]

    @property
    def _room(self) -> int:
        """Maximum number of candidates of all rows, if a pace chooses."""
        return 0 if self._pace is None else max(self._pace.room - self.rows, self.rows)

    @property
    def max_candidates(self) -> int:
        """Maximum number of candidates of a row."""
        return (MOST_CHOSEN_NODES if self._nodes is None else self._nodes) - 1

    def begin(self, teaches: int = True) -> None:
        """Count a row of the step, begun by `begin_step`; the value of nodes for learning is the mean over rows.

        Args:
            teaches: Whether its drafter learns the predictions after its nodes; for several rows, in how many.
        """
        self._teaching += teaches

    def choose(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the number of candidates of each row to send (`StepBudget.choose`)."""
        if self.backs_off:
            return np.zeros_like(counts)
        nodes = roots.nodes
        order = np.argsort(-likely, kind="stable")  # stable: candidates of one row keep their order
        if self._pace is None:
            sent = min(max((self._nodes or 0) - nodes, 0), len(order))
        else:
            sent = self._pace.choose(
                likely[order[: self._room]], nodes, shared=True, taught=TAUGHT * self._teaching / self.rows
            )
            self.backs_off = self._pace.in_rest  # the search was only a probe
        owners = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(owners[order[:sent]], minlength=len(counts))

    @property
    def searches(self) -> bool:
        """Whether the coming step searches for drafts."""
        return not self.backs_off

    def skip(self) -> bool:
        """Count a step of a long rest without timing it; return whether the step was part of one."""
        return self._pace is not None and self._pace.skip()

    def book(self, step: StepTime) -> None:
        """Learn from the time and outcome of a step."""
        if self._pace is not None:
            self._pace.book(step)
