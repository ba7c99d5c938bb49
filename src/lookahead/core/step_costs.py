"""Seconds of a step as a function of its number of nodes, learned from timed steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, TypedLoop, compiled, inner
from lookahead.errors import InvalidArgumentError

GRID = np.array((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096), dtype=np.int64)
"""Nodes of the step sizes with an estimated time; between two sizes the time is linear."""

PLAIN = len(GRID)
"""Index of plain steps, which search for no draft, after the sizes of `GRID`."""

NODE_COST = 0.012
"""Initial guess of the time that each node adds, in plain steps."""

NOISE = 0.05
"""Minimum standard deviation of equal steps, as a fraction of their time; more is learned over some 32 steps."""

SPREAD = 0.15
"""Standard deviation of the error of the guess per doubling of nodes, as a fraction of the time."""

DRIFT = 0.02
"""Standard deviation of the common change of all step times from one step to the next, as a fraction of the time."""

CHANGE = 3
"""Standard deviations beyond which a step is an outlier; number of slow outliers in a row that change the speed."""

_FORMAT = 2

_DOUBLINGS = np.append(1 + np.log2(GRID), 0)
_SPREADS = np.multiply(SPREAD**2, np.minimum.outer(_DOUBLINGS, _DOUBLINGS))
"""Covariance of the deviations from plain steps, a random walk over doublings, `[sizes + 1, sizes + 1]`."""
_INITIAL_COVARIANCE = np.add(1, _SPREADS)
"""Covariance up to a factor, at first and of each change: all steps together, and the deviations of sizes."""


class FilterState(NamedTuple):
    """State of a Kalman filter of the logarithms of step times relative to the guess.

    All sizes share one filter: when other programs slow the machine down, plain steps become slower as well, although
    they are rarely timed.

    Attributes:
        guess: Expected time of a step of each size, and the time that each token of text adds to it, `[2, sizes]`.
        state: Logarithm of the time over the guess, for each size and for a plain step, `[sizes + 1]`.
        covariance: Covariance of `state`, `[sizes + 1, sizes + 1]`.
        cross_covariance: Covariance of `state` with the latest step, `[sizes + 1]`.
        noise: Variance of single steps, `[1]`.
        outliers: Number of slow outliers in a row, `[sizes + 1]`.
        times: Number of timed steps, `[sizes + 1]`.
        expected: Guess for the text length of the latest step, `[sizes]`.
        curve: Estimated seconds for this length, `[sizes]`.
    """

    guess: NDArray[np.float64]
    state: NDArray[np.float64]
    covariance: NDArray[np.float64]
    cross_covariance: NDArray[np.float64]
    noise: NDArray[np.float64]
    outliers: NDArray[np.int64]
    times: NDArray[np.int64]
    expected: NDArray[np.float64]
    curve: NDArray[np.float64]


class StepCosts:
    """Estimate seconds of a step from its number of nodes, with a curve that never falls.

    Sizes without a timed step are expected to deviate from the guess as the nearest timed ones do.

    Args:
        fixed: Guessed time of a step of each size of `GRID`, in seconds or any other unit, `[sizes]`; by default
            each node adds 1.2 % of a plain step.
        per_token: Time that each token of text adds, `[sizes]`; 0 by default.
        captured: Sizes that steps are padded to, ascending, if passes have fixed sizes.

    Attributes:
        captured: Sizes that steps are padded to.
        curve: Seconds of a step of each size of `GRID`, for about the text length of the latest step, `[sizes]`.
        times: Number of timed drafted steps of each size, then of plain steps, `[sizes + 1]`.
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
        state, cross_covariance = np.zeros((2, PLAIN + 1))
        covariance = _INITIAL_COVARIANCE + 100  # of logarithms: large, because the guess may be in any unit
        outliers, times = np.zeros((2, PLAIN + 1), dtype=np.int64)
        noise = np.array([NOISE**2])
        expected = guess.copy()
        curve = guess.copy()
        self._filter = FilterState(
            self._guess, state, covariance, cross_covariance, noise, outliers, times, expected, curve
        )
        self.curve = curve
        self.times = times
        self._learn = TypedLoop(_update)

    @classmethod
    def fit(cls, points: Iterable[tuple[int, int, float]]) -> StepCosts:
        """Return the curve through measured points: for each size a straight line over the text lengths.

        Args:
            points: Nodes, tokens of text before them, and seconds of a step, preferably medians.

        Raises:
            InvalidArgumentError: Seconds of a point are not above 0, for example because of a coarse clock.
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
        """Return costs that start from this curve as their guess."""
        return StepCosts(self.curve, captured=self.captured)

    def forget(self) -> None:
        """Forget the timed drafted steps and widen their covariance, after a pause of drafting."""
        self.times[:PLAIN] = 0
        self._filter.covariance[:] += _SPREADS

    def padded(self, nodes: int) -> int:
        """Return the number of nodes after padding to a captured size."""
        return next((size for size in self.captured if size >= nodes), nodes) if self.captured else nodes

    def observe(self, nodes: int, context: int, seconds: float, plain: bool = False) -> bool:
        """Learn from the time of a step; return whether the costs have changed.

        Times that are not finite and above 0, for example from a coarse clock, are ignored.
        """
        if not 0 < seconds < math.inf:
            return False
        nodes = self.padded(nodes)
        if plain:
            self._plain_nodes = nodes
        return bool(self._learn(nodes, context, seconds, self._plain_nodes, plain, self._filter))

    def was_timed(self, nodes: int) -> bool:
        """Return whether a drafted step of about `nodes` nodes was timed."""
        return bool(self.times[np.abs(GRID - self.padded(nodes)).argmin()])

    def seconds(self, nodes: int) -> float:
        """Return the seconds of a drafted step of `nodes` nodes."""
        return seconds_at(self.curve, self.padded(nodes))

    def plain(self, rows: int) -> float:
        """Return the seconds of a plain step of `rows` rows, without a search for drafts."""
        return math.exp(self._filter.state[PLAIN]) * seconds_at(self._filter.expected, self.padded(rows))

    def expected(self, nodes: float | NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """Return the guessed time of steps of `nodes` nodes, in the unit of the guess."""
        return np.asarray(np.interp(np.asarray(nodes), GRID, self._guess[0] + context * self._guess[1]))

    def to_dict(self) -> dict[str, Any]:
        """Return the guess as plain numbers and lists, ready for JSON."""
        return {"format": _FORMAT, "fixed": self._guess[0].tolist(), "per_token": self._guess[1].tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCosts:
        """Return the costs that `to_dict` described.

        Raises:
            KeyError, TypeError, ValueError: The values are not from `to_dict`.
            InvalidArgumentError: They have another format, or are not finite, positive and rising.
        """
        if values["format"] != _FORMAT:
            raise InvalidArgumentError(
                f"values has format={values['format']!r}, expected {_FORMAT}; measure the costs again"
            )
        both = np.array([values["fixed"], values["per_token"]], dtype=np.float64)
        rises = both.shape == (2, PLAIN) and np.isfinite(both).all() and (np.diff(both) >= 0).all()
        if not rises or both[0, 0] <= 0 or both[1, 0] < 0:
            raise InvalidArgumentError(
                "values has step times that are not finite, positive and rising; measure the costs again"
            )
        return cls(*both)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line by least squares; return its seconds without text and per token of text, both at least 0."""
    contexts, seconds = np.array(points, dtype=np.float64).T
    spread = contexts - contexts.mean()
    slope = max(float(spread @ seconds) / float(spread @ spread), 0.0) if spread.any() else 0.0
    fixed = float(seconds.mean() - slope * contexts.mean())
    if fixed >= 0:
        return fixed, slope
    return 0.0, float(contexts @ seconds / (contexts @ contexts))


@inner
def _place(nodes: int) -> tuple[int, float]:
    """Return the index in `GRID` of the next smaller size, and the fraction of the way to the next larger one."""
    place = FIRST
    while place + 2 < PLAIN and GRID[place + 1] < nodes:
        place += 1
    return place, (nodes - GRID[place]) / (GRID[place + 1] - GRID[place])


@compiled
def seconds_at(curve: NDArray[np.float64], nodes: int) -> float:
    """Return the time of a step, interpolated between the two nearest sizes of `GRID`."""
    place, share = _place(nodes)
    return float(curve[place] + share * (curve[place + 1] - curve[place]))


@compiled
def _update(nodes: int, context: int, seconds: float, plain_nodes: int, plain: bool, filter_state: FilterState) -> bool:
    """Update the filter with the time of a step; return whether the costs have changed."""
    guess, state, covariance, cross_covariance, noise, outliers, times, expected, _ = filter_state
    for size in range(PLAIN):
        expected[size] = guess[0, size] + context * guess[1, size]
    low, share = _place(nodes)
    high = low + 1
    share = min(share, 1.0)
    if plain:
        low = PLAIN
        high = PLAIN
        share = 0.0
    variance = _add_process_noise(covariance, DRIFT**2, low, high, share, cross_covariance)
    error = math.log(seconds / seconds_at(expected, nodes)) - (1 - share) * state[low] - share * state[high]

    size = high if share > 0.5 else low
    usual = CHANGE * math.sqrt(variance + noise[0])
    times[size] += 1
    outliers[size] = outliers[size] + 1 if error > usual else 0
    changed = bool(error < -usual or outliers[size] >= CHANGE)
    if changed:
        outliers[size] = 0
        variance = _add_process_noise(covariance, error * error, low, high, share, cross_covariance)
    else:
        error = min(error, usual)
        noise[0] += (max(error * error * noise[0] / (variance + noise[0]), NOISE**2) - noise[0]) / 32
    for size in range(PLAIN + 1):
        gain = cross_covariance[size] / (variance + noise[0])
        state[size] += gain * error
        for other in range(PLAIN + 1):
            covariance[size, other] -= gain * cross_covariance[other]
    _evaluate_curve(_place(plain_nodes)[0], filter_state)
    return changed


@inner
def _add_process_noise(
    covariance: NDArray[np.float64],
    added: float,
    low: int,
    high: int,
    share: float,
    cross_covariance: NDArray[np.float64],
) -> float:
    """Predict: add process noise to the covariance; return the variance of a step between two sizes.

    Writes the covariance of each size with this step to `cross_covariance`.
    """
    for size in range(PLAIN + 1):
        for other in range(PLAIN + 1):
            covariance[size, other] += added * _INITIAL_COVARIANCE[size, other]
    for size in range(PLAIN + 1):
        cross_covariance[size] = (1 - share) * covariance[low, size] + share * covariance[high, size]
    return float((1 - share) * cross_covariance[low] + share * cross_covariance[high])


@inner
def _evaluate_curve(plain_place: int, filter_state: FilterState) -> None:
    """Write the estimated seconds of each size to `curve`, made non-decreasing from the plain size on."""
    _, state, covariance, _, _, _, _, expected, curve = filter_state
    for size in range(PLAIN):
        curve[size] = math.exp(state[size]) * expected[size]
    variance = covariance[PLAIN - 1, PLAIN - 1]
    for size in range(PLAIN - 2, -1, -1):  # a larger size with less variance overrules
        if covariance[size, size] > variance and curve[size + 1] < curve[size]:
            curve[size] = curve[size + 1]
        else:
            variance = covariance[size, size]
    floor = math.exp(state[PLAIN]) * expected[plain_place]
    for size in range(plain_place, PLAIN):
        curve[size] = floor = max(curve[size], floor)
