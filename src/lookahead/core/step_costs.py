"""What a step costs: its seconds as a function of its nodes, learned from the steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, TypedLoop, compiled, inner
from lookahead.errors import InvalidArgumentError

GRID = np.array((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096), dtype=np.int64)
"""Nodes of a step, whose times are estimated; between two of them the time is a straight line."""

PLAIN = len(GRID)
"""The place of plain steps, for which no draft is looked for."""

NODE_COST = 0.012
"""What a node adds to a step where nothing else is known, in plain steps: as in 16 bits on a CPU, where 8 nodes took
1.1 to 1.3 and 64 nodes 1.8 to 4 plain steps. Steps of 8, 16 and 32 nodes correct it within three steps."""

NOISE = 0.05
"""How much steps of equal size differ, as a part of their time: more is learned, over some 32 steps. Two cores that
others use: a sixth."""

SPREAD = 0.15
"""How far sizes deviate from the guess, as a part of their time, each from one of half as many nodes. Steps of 8
nodes in float32 on a CPU take half as long again as the guess, three of these."""

DRIFT = 0.02
"""How much all steps together change from one to the next, likewise: texts get longer, and others use the machine."""

CHANGE = 3
"""A step surprises if it differs by so many standard deviations, and so many in a row of a size are a change. Single
ones that take long were disturbed. Nothing makes a step shorter but a change."""

_FORMAT = 2

_DOUBLINGS = np.append(1 + np.log2(GRID), 0)
_SPREADS = np.multiply(SPREAD**2, np.minimum.outer(_DOUBLINGS, _DOUBLINGS))
"""How far sizes deviate from plain steps, `[sizes + 1, sizes + 1]`: in a random walk over doublings."""
_UNKNOWN = np.add(1, _SPREADS)
"""What is not known at first, nor after a change: besides that, how fast all steps are."""


class Seen(NamedTuple):
    """What steps took: the state of a Kalman filter of the logarithms of their times over the guess.

    When others slow the machine down, all steps become slower, and plain ones, that are timed now and then alone, are
    known to have. By medians of the times of each size HumanEval at 0.8 went at 0.97 of plain decoding, now at 1.03.

    Attributes:
        guess: Expected time of a step of each size, and what each token of text adds to it, `[2, sizes]`.
        over: What each size, and a plain step, is expected to take over the guess, in logarithms, `[sizes + 1]`.
        unknown: Their covariance, `[sizes + 1, sizes + 1]`.
        along: The covariance of each with the latest step, `[sizes + 1]`.
        noise: The variance of single steps, `[1]`.
        surprises: How many there were in a row, `[sizes + 1]`.
        times: How many steps were timed, `[sizes + 1]`.
        expected: The guess after as much text as the latest step had, `[sizes]`.
        curve: What steps take then, `[sizes]`.
    """

    guess: NDArray[np.float64]
    over: NDArray[np.float64]
    unknown: NDArray[np.float64]
    along: NDArray[np.float64]
    noise: NDArray[np.float64]
    surprises: NDArray[np.int64]
    times: NDArray[np.int64]
    expected: NDArray[np.float64]
    curve: NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its nodes: a curve that never falls.

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
        over, along = np.zeros((2, PLAIN + 1))
        unknown = _UNKNOWN + 100  # in logarithms: the guess may be in any unit
        surprises, times = np.zeros((2, PLAIN + 1), dtype=np.int64)
        noise, expected, curve = np.array([NOISE**2]), guess.copy(), guess.copy()
        self._seen = Seen(self._guess, over, unknown, along, noise, surprises, times, expected, curve)
        self.curve, self.times = curve, times
        self._learn = TypedLoop(_observe)

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
        self._seen.unknown[:] += _SPREADS

    def padded(self, nodes: int) -> int:
        """Nodes that a step of so many nodes is run with."""
        return next((size for size in self.captured if size >= nodes), nodes)

    def observe(self, nodes: int, context: int, seconds: float, plain: bool = False) -> bool:
        """Learn from a step; returns whether costs have changed. A time that no step can have, as from a coarse clock,
        teaches nothing."""
        if not 0 < seconds < math.inf:
            return False
        nodes = self.padded(nodes)
        if plain:
            self._plain_nodes = nodes
        return bool(self._learn(nodes, context, seconds, self._plain_nodes, plain, self._seen))

    def was_timed(self, nodes: int) -> bool:
        """Whether a drafted step of about so many nodes was timed."""
        return bool(self.times[np.abs(GRID - self.padded(nodes)).argmin()])

    def seconds(self, nodes: int) -> float:
        """Seconds of a step of so many nodes."""
        return seconds_at(self.curve, self.padded(nodes))

    def plain(self, rows: int) -> float:
        """Seconds of a step of so many rows in which no draft is looked for."""
        return math.exp(self._seen.over[PLAIN]) * seconds_at(self._seen.expected, self.padded(rows))

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
def _place(nodes: int) -> tuple[int, float]:
    """The place in `GRID` of the next smaller size, and how much of the way to the next larger one is gone."""
    place = FIRST
    while place + 2 < PLAIN and GRID[place + 1] < nodes:
        place += 1
    return place, (nodes - GRID[place]) / (GRID[place + 1] - GRID[place])


@compiled
def seconds_at(curve: NDArray[np.float64], nodes: int) -> float:
    """The time of a step, between those of the two nearest sizes of `GRID`."""
    place, share = _place(nodes)
    return float(curve[place] + share * (curve[place + 1] - curve[place]))


@compiled
def _observe(nodes: int, context: int, seconds: float, plain_nodes: int, plain: bool, seen: Seen) -> bool:
    """Correct by the time of a step what all are expected to take; returns whether it changed."""
    guess, over, unknown, along, noise, surprises, times, expected, _ = seen
    for size in range(PLAIN):
        expected[size] = guess[0, size] + context * guess[1, size]
    low, share = _place(nodes)
    high, share = low + 1, min(share, 1.0)
    if plain:
        low, high, share = PLAIN, PLAIN, 0.0
    known = _widen(unknown, DRIFT**2, low, high, share, along)
    error = math.log(seconds / seconds_at(expected, nodes)) - (1 - share) * over[low] - share * over[high]

    size, usual = high if share > 0.5 else low, CHANGE * math.sqrt(known + noise[0])
    times[size] += 1
    surprises[size] = surprises[size] + 1 if error > usual else 0
    changed = bool(error < -usual or surprises[size] >= CHANGE)
    if changed:
        surprises[size] = 0
        known = _widen(unknown, error * error, low, high, share, along)
    else:
        error = min(error, usual)
        noise[0] += (max(error * error * noise[0] / (known + noise[0]), NOISE**2) - noise[0]) / 32
    for size in range(PLAIN + 1):
        gain = along[size] / (known + noise[0])
        over[size] += gain * error
        for other in range(PLAIN + 1):
            unknown[size, other] -= gain * along[other]
    _draw(_place(plain_nodes)[0], seen)
    return changed


@inner
def _widen(
    unknown: NDArray[np.float64], much: float, low: int, high: int, share: float, along: NDArray[np.float64]
) -> float:
    """Know less of what steps take: they may have changed by so much. Returns the variance of a step between two sizes,
    after putting its covariance with each into `along`."""
    for size in range(PLAIN + 1):
        for other in range(PLAIN + 1):
            unknown[size, other] += much * _UNKNOWN[size, other]
    for size in range(PLAIN + 1):
        along[size] = (1 - share) * unknown[low, size] + share * unknown[high, size]
    return float((1 - share) * along[low] + share * along[high])


@inner
def _draw(plain_place: int, seen: Seen) -> None:
    """Draw the curve."""
    _, over, unknown, _, _, _, _, expected, curve = seen
    for size in range(PLAIN):
        curve[size] = math.exp(over[size]) * expected[size]
    known = unknown[PLAIN - 1, PLAIN - 1]
    for size in range(PLAIN - 2, -1, -1):  # what is less known of a size, a larger one may belie
        if unknown[size, size] > known and curve[size + 1] < curve[size]:
            curve[size] = curve[size + 1]
        else:
            known = unknown[size, size]
    least = math.exp(over[PLAIN]) * expected[plain_place]
    for size in range(plain_place, PLAIN):
        curve[size] = least = max(curve[size], least)
