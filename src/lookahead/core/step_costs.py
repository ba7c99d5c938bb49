"""What a step costs: its seconds as a function of its nodes, learned from the steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.errors import InvalidArgumentError

GRID = np.array((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096), dtype=np.int64)
"""Nodes of a step, around which times are gathered; between two of them the time is a straight line."""

PLAIN = len(GRID)
"""The bucket of plain steps, for which no draft is looked for."""

NODE_COST = 0.012
"""What a node adds to a step where nothing else is known, in plain steps: as in 16 bits on a CPU, where 8 nodes took
1.1 to 1.3 and 64 nodes 1.8 to 4 plain steps. Steps of 8, 16 and 32 nodes correct it within three steps."""

TIMES = 31
"""Times of a bucket whose median counts; older ones are forgotten. Steps of equal size differ by a sixth (two cores
that others use), and what eight more nodes cost is about a tenth: the medians of 5 times hid it."""

CHANGE = 3
"""So many times of a bucket in a row that surprise by more than `SURPRISE` are a change: those before are forgotten."""

DRIFT, SURPRISE = 0.05, 0.3
"""A step whose bucket is full moves all buckets by this part of its surprise, which counts up to `SURPRISE`: texts get
longer, and others use the machine."""

_FORMAT = 2


class Seen(NamedTuple):
    """What steps took.

    Attributes:
        guess: Expected time of a step of each size, and what each token of text adds to it, `[2, sizes]`.
        ratios: The last times of each bucket over the guess and the level of all, `[sizes + 1, TIMES]`.
        medians: Those of each bucket, `[sizes + 1]`; nothing where there were no times.
        times: How many there were, `[sizes + 1]`.
        level: That of all steps, over the guess, `[1]`.
        expected: The guess after as much text as the latest step had, `[sizes]`.
        curve: What steps take then, `[sizes]`.
    """

    guess: NDArray[np.float64]
    ratios: NDArray[np.float64]
    medians: NDArray[np.float64]
    times: NDArray[np.int64]
    level: NDArray[np.float64]
    expected: NDArray[np.float64]
    curve: NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its nodes: a curve that never falls, through the medians of the last times of each bucket.

    Sizes that were not run yet are expected to deviate from the guess as the nearest ones that were.

    Args:
        fixed: Guessed time of a step of each size of `GRID`, in seconds or any other unit, `[sizes]`; if not given,
            each node adds 1.2 % of a plain step.
        per_token: What each token of text adds to it, `[sizes]`; nothing if not given.
        captured: Sizes that steps are padded to, ascending, if passes have fixed sizes.

    Attributes:
        captured: As above.
        curve: Seconds of a step of each size of `GRID`, after about as much text as the latest step had, `[sizes]`.
        times: How many steps of each size were timed, and how many plain ones, `[sizes + 1]`.
    """

    def __init__(
        self,
        fixed: Sequence[float] | NDArray[np.float64] | None = None,
        per_token: Sequence[float] | NDArray[np.float64] | None = None,
        captured: Sequence[int] = (),
    ) -> None:
        guess = 1 + NODE_COST * (GRID - 1) if fixed is None else np.array(fixed, dtype=np.float64)
        self._guess = np.stack([guess, np.zeros(PLAIN) if per_token is None else np.array(per_token, dtype=np.float64)])
        self.captured = captured
        self._plain_nodes = 1  # of the latest plain step
        ratios, times = np.zeros((PLAIN + 1, TIMES)), np.zeros(PLAIN + 1, dtype=np.int64)
        self._seen = Seen(self._guess, ratios, np.ones(PLAIN + 1), times, np.ones(1), guess.copy(), guess.copy())
        self.curve, self.times = self._seen.curve, times

    @classmethod
    def fit(cls, points: Iterable[tuple[int, int, float]]) -> StepCosts:
        """The curve through measured points: for each size a straight line over the contexts.

        Args:
            points: Nodes, tokens of text before them, and seconds of a step; best medians.

        Raises:
            InvalidArgumentError: A step took no time, as by a coarse clock.
        """
        by_size: dict[int, list[tuple[int, float]]] = {}
        for nodes, context, seconds in points:
            if not seconds > 0:
                raise InvalidArgumentError(f"points has seconds={seconds} for {nodes} nodes; they must be above 0")
            by_size.setdefault(nodes, []).append((context, seconds))
        sizes = sorted(by_size)
        lines = np.maximum.accumulate([_line(by_size[size]) for size in sizes])  # [sizes, 2], rising
        beyond = np.maximum(GRID / sizes[-1], 1)[:, None]  # larger steps take longer in proportion
        curves = beyond * np.stack([np.interp(GRID, sizes, lines[:, part]) for part in range(2)], axis=1)
        return cls(curves[:, 0], curves[:, 1])

    def similar(self) -> StepCosts:
        """Costs of steps that are expected to take as long as these, until steps of their own show better."""
        return StepCosts(self.curve, captured=self.captured)

    def forget(self) -> None:
        """Forget what drafted steps took, as after a while without any."""
        self.times[:PLAIN] = 0

    def padded(self, nodes: int) -> int:
        """Nodes that a step of so many nodes is run with."""
        return next((size for size in self.captured if size >= nodes), nodes)

    def observe(self, nodes: int, context: int, seconds: float, plain: bool = False) -> None:
        """Learn from a step. A time that no step can have, as from a coarse clock, teaches nothing."""
        if 0 < seconds < math.inf:
            nodes = self.padded(nodes)
            if plain:
                self._plain_nodes = nodes
            _observe(nodes, context, seconds, self._plain_nodes, plain, self._seen)

    def was_timed(self, nodes: int) -> bool:
        """Whether a drafted step of about so many nodes was timed."""
        return bool(self.times[np.abs(np.log(GRID / self.padded(nodes))).argmin()])

    def seconds(self, nodes: int) -> float:
        """Seconds of a step of so many nodes."""
        return seconds_at(self.curve, self.padded(nodes))

    def plain(self, rows: int) -> float:
        """Seconds of a step of so many rows in which no draft is looked for."""
        level = self._seen.level[0] * self._seen.medians[PLAIN]
        return float(level * seconds_at(self._seen.expected, self.padded(rows)))

    def expected(self, nodes: float | NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """What steps of so many nodes were guessed or measured to take before any was timed, in the guess's unit."""
        return np.asarray(np.interp(np.asarray(nodes), GRID, self._guess[0] + context * self._guess[1]))

    def to_dict(self) -> dict[str, Any]:
        """The guess as plain numbers and lists, ready for JSON."""
        return {"format": _FORMAT, "fixed": self._guess[0].tolist(), "per_token": self._guess[1].tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCosts:
        """The costs that `to_dict` described.

        Raises:
            KeyError, TypeError, ValueError: The values are not from `to_dict`.
            InvalidArgumentError: They are from another version, or what no steps cost.
        """
        if values["format"] != _FORMAT:
            raise InvalidArgumentError(f"values are no costs of format {_FORMAT}; measure them again")
        both = np.array([values["fixed"], values["per_token"]], dtype=np.float64)
        rises = both.shape == (2, PLAIN) and np.isfinite(both).all() and (np.diff(both) >= 0).all()
        if not rises or both[0, 0] <= 0 or both[1, 0] < 0:
            raise InvalidArgumentError("values have costs that no steps have; measure them again")
        return cls(*both)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds without text and for each token of it, neither below 0, by least squares."""
    contexts, seconds = np.array(points, dtype=np.float64).T
    spread = contexts - contexts.mean()
    slope = max(float(spread @ seconds) / float(spread @ spread), 0.0) if spread.any() else 0.0
    fixed = float(seconds.mean() - slope * contexts.mean())
    if fixed >= 0:
        return fixed, slope
    return 0.0, float(contexts @ seconds / (contexts @ contexts))


@inner
def _bucket(nodes: int) -> int:
    """The place in `GRID` of the size that is nearest to `nodes`, by ratio."""
    place = FIRST
    while place + 1 < PLAIN and GRID[place] * GRID[place + 1] < nodes * nodes:
        place += 1
    return place


@compiled
def seconds_at(curve: NDArray[np.float64], nodes: int) -> float:
    """The time of a step, between those of the two nearest sizes of `GRID`."""
    place = FIRST
    while place + 2 < PLAIN and GRID[place + 1] < nodes:
        place += 1
    smaller, seconds = GRID[place], curve[place]
    share = (nodes - smaller) / (GRID[place + 1] - smaller)
    return float(seconds + share * (curve[place + 1] - seconds))


@inner
def _median(times: NDArray[np.float64], seen: int) -> float:
    """The lower middle of the latest of so many: what disturbs a step only ever makes it longer."""
    count = min(seen, TIMES)
    for rank in range(count):
        median, below, ties = times[rank], FIRST, FIRST
        for other in range(count):
            below += times[other] < median
            ties += times[other] == median
        if below <= (count - 1) // 2 < below + ties:
            return float(median)
    return 1.0


@inner
def _without_outdated(times: NDArray[np.float64], seen: int, median: float) -> int:
    """How many of a bucket's times count: of so many the latest alone if those all surprise. They are moved then."""
    if seen <= CHANGE:
        return seen
    for back in range(1, CHANGE + 1):
        if abs(times[(seen - back) % TIMES] / median - 1) <= SURPRISE:
            return seen
    for place in range(CHANGE):
        latest = (seen - 1 - place) % TIMES
        times[place], times[latest] = times[latest], times[place]
    return CHANGE


@compiled
def _observe(nodes: int, context: int, seconds: float, plain_nodes: int, plain: bool, seen: Seen) -> None:
    """Put the time of a step, over the guessed one, into its bucket, and draw the curve anew."""
    guess, ratios, medians, times, level, expected, _ = seen
    known = times[PLAIN]
    for size in range(PLAIN):
        expected[size] = guess[0, size] + context * guess[1, size]
        known += times[size]
    ratio, place = seconds / seconds_at(expected, nodes), PLAIN if plain else _bucket(nodes)
    if known == 0:
        level[0] = ratio
    if times[place] >= TIMES:
        surprise = ratio / level[0] / medians[place] - 1
        level[0] *= 1 + DRIFT * min(max(surprise, -SURPRISE), SURPRISE)
    ratios[place, times[place] % TIMES] = ratio / level[0]
    times[place] = _without_outdated(ratios[place], times[place] + 1, medians[place])
    medians[place] = _median(ratios[place], times[place])
    _draw(_bucket(plain_nodes), seen)


@inner
def _draw(plain_place: int, seen: Seen) -> None:
    """Draw the curve through the medians."""
    _, _, medians, times, level, expected, curve = seen
    last, before = FIRST - 1, medians[0]  # size that was seen, and its median
    for size in range(PLAIN):
        # Where nothing was sent: about as a plain step.
        bucket = PLAIN if size == plain_place and times[size] == 0 else size
        if times[bucket] > 0:
            median = medians[bucket]
            for between in range(last + 1, size):
                share = (between - last) / (size - last)
                curve[between] = median if last < 0 else before + share * (median - before)
            curve[size] = median
            last, before = size, median
    for size in range(last + 1, PLAIN):
        curve[size] = before
    for size in range(PLAIN):
        curve[size] *= level[0] * expected[size]
    for size in range(last - 1, -1, -1):  # what few steps say of a size, a larger one may belie
        if times[size] < TIMES and curve[size + 1] < curve[size]:
            curve[size] = curve[size + 1]
    least = level[0] * medians[PLAIN] * expected[plain_place]
    for size in range(plain_place, PLAIN):
        if curve[size] < least:
            curve[size] = least
        least = curve[size]
