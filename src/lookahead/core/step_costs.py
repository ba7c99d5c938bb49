"""What a step costs: its seconds as a function of its nodes, learned from the steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner

GRID = np.array((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096), dtype=np.int64)
"""Nodes of a step, around which times are gathered; between two of them the time is a straight line."""

PLAIN = len(GRID)
"""The bucket of plain steps, for which no draft is looked for."""

NODE_COST = 0.005
"""What a node adds to a step where nothing else is known, in plain steps: little, as what looks dear is not tried."""

TIMES, PLAIN_TIMES = 9, 5
"""Times of a bucket whose median counts; older ones are forgotten. Five steps show a change, one bad step does not. Of
plain steps, which are rare while drafts pay, fewer: texts get longer meanwhile."""

SETTLED, DRIFT, MOST_DRIFT = 4, 0.05, 0.3
"""From so many times on, a step moves all buckets by this part of its surprise, which counts up to `MOST_DRIFT`: texts
get longer, and others use the machine."""


class StepCosts:
    """Seconds of a step by its nodes: a curve that never falls, through the medians of the last times of each bucket.

    Sizes that were not run yet are expected to deviate from the guess as the nearest ones that were.

    Args:
        fixed: Guessed time of a step of each size of `GRID`, in seconds or any other unit, `[sizes]`; if not given,
            each node adds 0.5 % of a plain step.
        per_token: What each token of text adds to it, `[sizes]`; nothing if not given.
        captured: Sizes that steps are padded to, ascending, if passes have fixed sizes.

    Attributes:
        curve: Seconds of a step of each size of `GRID`, after about as much text as the latest step had, `[sizes]`.
        times: How many steps of each size were timed, and how many plain ones, `[sizes + 1]`.
    """

    def __init__(
        self,
        fixed: Sequence[float] | None = None,
        per_token: Sequence[float] | None = None,
        captured: Sequence[int] = (),
    ) -> None:
        guess = 1 + NODE_COST * (GRID - 1) if fixed is None else np.array(fixed, dtype=np.float64)
        self._guess = np.stack([guess, np.zeros(PLAIN) if per_token is None else np.array(per_token, dtype=np.float64)])
        self._captured = captured
        self._ratios = np.zeros((PLAIN + 1, TIMES))
        self._expected = guess.copy()  # after as much text as the latest step had
        self._levels = np.ones(2)  # of all steps, and of plain ones beside it
        self.curve = guess.copy()
        self.times = np.zeros(PLAIN + 1, dtype=np.int64)

    def padded(self, nodes: int) -> int:
        """Nodes that a step of so many nodes is run with."""
        return next((size for size in self._captured if size >= nodes), nodes)

    def observe(self, nodes: int, context: int, seconds: float, plain: bool = False) -> None:
        """Learn from a step. A time that no step can have, as from a coarse clock, teaches nothing."""
        if not 0 < seconds < math.inf:
            return
        nodes = self.padded(nodes)
        np.add(self._guess[0], context * self._guess[1], out=self._expected)
        ratio = seconds / seconds_at(self._expected, nodes)
        place = PLAIN if plain else bucket(nodes)
        _observe(place, ratio, self._ratios, self.times, self._levels, self._expected, self.curve)

    def seconds(self, nodes: int, plain: bool = False) -> float:
        """Seconds of a step of so many nodes; of a plain one, in which no draft is looked for."""
        if plain:
            return float(self._levels.prod()) * seconds_at(self._expected, self.padded(nodes))
        return seconds_at(self.curve, self.padded(nodes))


@compiled
def bucket(nodes: int) -> int:
    """The place in `GRID` of the size that is nearest to `nodes`, by ratio."""
    place = 0
    while place + 1 < PLAIN and GRID[place] * GRID[place + 1] < nodes * nodes:
        place += 1
    return place


@compiled
def seconds_at(curve: NDArray[np.float64], nodes: int) -> float:
    """The time of a step, between those of the two nearest sizes of `GRID`."""
    place = 0
    while place + 2 < PLAIN and GRID[place + 1] < nodes:
        place += 1
    share = (nodes - GRID[place]) / (GRID[place + 1] - GRID[place])
    return float(curve[place] + share * (curve[place + 1] - curve[place]))


@inner
def _median(times: NDArray[np.float64], seen: int) -> float:
    """The lower middle of the latest of so many: what disturbs a step only ever makes it longer."""
    count = min(seen, TIMES)
    for rank in range(count):
        below = ties = 0
        for other in range(count):
            below += times[other] < times[rank]
            ties += times[other] == times[rank]
        if below <= (count - 1) // 2 < below + ties:
            return float(times[rank])
    return 1.0


@compiled
def _observe(
    place: int,
    ratio: float,
    ratios: NDArray[np.float64],
    times: NDArray[np.int64],
    levels: NDArray[np.float64],
    expected: NDArray[np.float64],
    curve: NDArray[np.float64],
) -> None:
    """Put the time of a step, over the guessed one, into its bucket; draw the curve anew."""
    if times.sum() == 0:
        levels[0] = ratio
    if times[place] >= SETTLED:
        usual = levels[1] if place == PLAIN else _median(ratios[place], times[place])
        surprise = ratio / levels[0] / usual - 1
        levels[0] *= 1 + DRIFT * min(max(surprise, -MOST_DRIFT), MOST_DRIFT)
    ratios[place, times[place] % (PLAIN_TIMES if place == PLAIN else TIMES)] = ratio / levels[0]
    times[place] += 1
    levels[1] = _median(ratios[PLAIN], min(times[PLAIN], PLAIN_TIMES))
    last = -1  # size that was seen
    for size in range(PLAIN):
        curve[size] = _median(ratios[size], times[size])
        if times[size] == 0:
            continue
        for between in range(last + 1, size):
            share = (between - last) / (size - last) if last >= 0 else 1.0
            curve[between] = curve[size] if last < 0 else curve[last] + share * (curve[size] - curve[last])
        last = size
    for size in range(last + 1, PLAIN):
        curve[size] = curve[max(last, 0)]
    for size in range(PLAIN):
        curve[size] *= levels[0] * expected[size]
    for size in range(last - 1, -1, -1):  # what few steps say of a size, a larger one may belie
        if times[size] < SETTLED:
            curve[size] = min(curve[size], curve[size + 1])
    least = levels[0] * levels[1] * expected[0]
    for size in range(PLAIN):
        least = curve[size] = max(curve[size], least)
