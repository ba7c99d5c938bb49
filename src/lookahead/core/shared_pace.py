"""Which nodes a step sends whose rows are those of many requests: the likeliest of all rows, as many as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.pace import TAUGHT, Pace
from lookahead.core.protocols import Send
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree

_NO_CANDIDATES, _NO_ROWS = np.zeros(0), np.zeros(0, dtype=np.int64)


class SharedPace:
    """Has the candidates of all rows compete for the nodes of a step: one `StepBudget` for all of their drafters.

    They are put in one order, the likeliest first, whichever row they are of. So sure drafts of one row take the room
    of another's guesses, and where steps are full nothing is sent. There is a `Pace` for each load and temperature:
    what pays for two rows may not for fifty, and what pays for greedy rows may not for sampled ones.

    Args:
        first: Makes the pace of a load, in rows: 1, 2, 4, 8, ..., and of a temperature: 0, 0.5, 1, ...
        nodes: A fixed number of nodes of a step over all its rows, roots included, instead of what pays.

    Attributes:
        backs_off: Whether the coming step goes without a draft.
        least: How likely a candidate must be for it to be looked for.
        rows: How many it has.
    """

    def __init__(self, first: Callable[[int, float], Pace], nodes: int | None = None) -> None:
        self.backs_off = False
        self.least = 0.0
        self.rows = 0
        self._first = first
        self._nodes = nodes
        self._paces: dict[tuple[int, float], Pace] = {}
        self._pace: Pace | None = None
        self._offers: list[tuple[NDArray[np.float64], NDArray[np.int64], Callable[[NDArray[np.int64]], None]]] = []
        self._teaching = 0  # rows of the step whose nodes teach

    def begin_step(self, rows: int, temperature: float = 0.0) -> None:
        """Begin a step of so many rows, whose tokens are sampled with this temperature in the mean."""
        self._offers.clear()
        self.rows, self._teaching = rows, 0
        if self._nodes is not None:
            self.backs_off = self._nodes <= rows
            return
        self._pace = pace = self._of_load(1 << max(rows - 1, 0).bit_length(), round(2 * temperature) / 2)
        pace.begin(rows)
        self.backs_off, self.least = pace.rests, pace.least(rows) / 2

    def _of_load(self, load: int, temperature: float) -> Pace:
        """The pace of a load. It begins with what is known of the nearest one: requests come and go, and a load that
        had to find out everything by itself would be over before it has."""
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
    def most(self) -> int:
        """Most candidates of a row that may be sent."""
        return (MOST_CHOSEN_NODES if self._nodes is None else self._nodes) - 1

    def begin(self, teaches: bool = True) -> None:
        """See `StepBudget`; `begin_step` has begun the step of all rows. What nodes teach counts as in the mean row."""
        self._teaching += teaches

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`: sent when all rows have offered theirs."""
        offered = likely[: self.most]
        self.offer_rows(offered, np.array([len(offered)]), lambda counts: send(int(counts[0])))

    def offer_rows(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], send: Callable[[NDArray[np.int64]], None]
    ) -> None:
        """See `RowsBudget`."""
        self._offers.append((likely, counts, send))

    def share_out(self, trees: Sequence[TokenTree]) -> None:
        """Choose among all that was offered, and have it sent.

        Args:
            trees: Those of the step, with roots and pending tokens alone.
        """
        likely = np.concatenate([*(offered for offered, _, _ in self._offers), _NO_CANDIDATES])
        counts = np.concatenate([*(counts for _, counts, _ in self._offers), _NO_ROWS])
        sent, end = self.share(likely, counts, sum(map(len, trees)), self._teaching), 0
        for _, of_rows, send in self._offers:
            begin, end = end, end + len(of_rows)
            send(sent[begin:end])
        self._offers.clear()

    def share(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], pending: int, teaching: int
    ) -> NDArray[np.int64]:
        """Number of candidates of each row that are sent, `[rows]`.

        Args:
            likely: Probability that each candidate is accepted, row after row in the order of sending, `[candidates]`.
            counts: Candidates of each row, `[rows]`.
            pending: Nodes of the step without them.
            teaching: Rows of whose nodes it is learned what the model says after them.
        """
        if self.backs_off:
            return np.zeros_like(counts)
        order = np.argsort(-likely, kind="stable")  # those of a row stay in their order
        if self._pace is None:
            sent = min(max((self._nodes or 0) - pending, 0), len(order))
        else:
            room = max(self._pace.room - self.rows, self.rows)
            sent = self._pace.choose(likely[order[:room]], pending, shared=True, taught=TAUGHT * teaching / self.rows)
            self.backs_off = self._pace.in_rest  # it was but a look
        owners = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(owners[order[:sent]], minlength=len(counts))

    @property
    def searches(self) -> bool:
        """See `Pace`."""
        return not self.backs_off

    def skip(self) -> bool:
        """See `Pace.skip`."""
        return self._pace is not None and self._pace.skip()

    def book(self, step: StepTime) -> None:
        """Note what a step took and brought; see `Pace.book`."""
        if self._pace is not None:
            self._pace.book(step)
