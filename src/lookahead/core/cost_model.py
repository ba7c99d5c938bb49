"""What a step costs: its time as a function of its nodes and of the length of the text before it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes, in nodes, around which observations are gathered. Between two of them the time is a straight line."""

MEMORY = 15
"""Observations of a size that count; older ones are forgotten. Odd, so that the median is one of them."""

TRUST = 4
"""How many observations a size that `lookahead tune` measured counts for, as its median is one of many steps."""

SMALLEST_CHANGE = 0.005
"""A corrected size that moves by less than this part of itself is not worth a new table."""

OVERDUE = 8
"""A table is used for at most so many steps after a size moved, and while few were seen for an eighth of them: a new
one takes much of the time of a small model's step, and differs by little."""

RECENT = 9
"""Steps whose median surprise moves the pace: a change that lasts shows after five of them, one bad step never."""

PACE_GAIN, PACE_CLIP = 0.5, 0.15
"""Share of the median surprise that a step moves the pace by, and the most, in natural logarithms. Slow enough not to
follow noise, fast enough to be there before the medians of single sizes, which would take the change for their own."""

FEW = 16
"""Nodes of a step that are too few to tell what many of them cost."""

Point = tuple[int, int, float]
"""Nodes of a step, tokens of text before it, and its seconds."""

_FORMAT = 1


class CostModel:
    """Seconds of a step, from its number of nodes n and the length c of the text before it.

    The time is `pace * correction(n) * (fixed(n) + c * per_token(n))`. `fixed` and `per_token` come from
    measurements (`fit`) or are a guess (`prior`), `correction` and `pace` are learned from the steps observed:

    - around each size of `GRID` the last `MEMORY` steps are kept as ratios of observed and expected time, and their
      median is that size's correction. A size with few observations leans on its neighbours, and so does one that
      was never seen;
    - what all sizes have in common, a longer text or a machine that others slow down, is the pace, so that sizes
      that were not seen lately do not look cheap beside those that were.

    The time never falls with n or c. Every method takes microseconds: times come from a table that is built anew
    only after an observation has changed something.

    Args:
        knots: Sizes between which the time is a straight line, ascending, the first one 1. Beyond the last one it is
            expected to rise in proportion.
        fixed: Seconds of a step of each of these sizes without any text before it.
        per_token: Seconds that each token of text adds to a step of each of these sizes.
        pace: Factor on all times; `None` if `fixed` is in steps of one node instead of seconds, so that the first
            observation sets it.
        trusted: Sizes of `knots` that were measured.

    Attributes:
        observed: Steps that it has learned from.

    Raises:
        InvalidArgumentError: The sequences do not fit together, or a number is negative or not finite.
    """

    def __init__(
        self,
        knots: Sequence[int],
        fixed: Sequence[float],
        per_token: Sequence[float],
        pace: float | None = 1.0,
        trusted: Iterable[int] = (),
    ) -> None:
        _check_curve(knots, fixed, per_token, pace)
        more = [size for size in GRID if size > knots[-1]]  # what is seen there is to count as well
        self._knots = np.array([*knots, *more], dtype=np.float64)
        self._fixed, self._per_token = (
            _rising(np.array([*part, *[part[-1] * size / knots[-1] for size in more]])) for part in (fixed, per_token)
        )
        self._pace = pace
        self._trusted = sorted(set(trusted))
        self._ratios: list[list[float]] = [[] for _ in GRID]
        self._counts = [0] * len(GRID)
        self._medians = [1.0] * len(GRID)
        self._surprises: list[float] = []  # logarithms, in relation to the pace as it is now
        self.observed = 0
        for size in self._trusted:
            self._ratios[bucket(size)] = [1.0] * TRUST
            self._counts[bucket(size)] = TRUST
        self._changed = True
        self._due = 0  # how many observations there must be for a new table
        self._lock = Lock()  # calls in several threads learn from their steps together
        self._table: NDArray[np.float64] = np.empty((2, 0))  # of a step of n nodes: fixed, per token

    @classmethod
    def prior(cls) -> CostModel:
        """What to believe before anything was measured: flat to 8 nodes, then each node costs 1.2 % of a step.

        Rising at all keeps a controller from drafting for nothing, rising gently lets it try and see.
        """
        return cls(GRID, [_prior_time(size) for size in GRID], [0.0] * len(GRID), pace=None)

    @classmethod
    def fit(cls, points: Iterable[Point]) -> CostModel:
        """The curve through measured points.

        For each size a straight line over the contexts is fitted, then sizes are put into rising order. Beyond
        the largest size measured the time goes on with the steeper of two slopes, the last one and the mean one; if
        that size has less than `FEW` nodes, which is too few to tell a slope, it goes on as `prior` does.

        Args:
            points: Nodes, context, and seconds of a step; best medians. One context is enough, but then the time
                does not depend on it.

        Raises:
            InvalidArgumentError: There is no point, or one that no step can have.
        """
        by_size: dict[int, list[tuple[int, float]]] = {}
        for nodes, context, seconds in points:
            if nodes < 1 or context < 0 or not 0 < seconds < math.inf:
                raise InvalidArgumentError(
                    f"points has nodes={nodes}, context={context}, seconds={seconds}; they must be at least 1, at "
                    "least 0 and above 0"
                )
            by_size.setdefault(nodes, []).append((context, seconds))
        if not by_size:
            raise InvalidArgumentError("points is empty; measure at least one size")
        sizes = sorted(by_size)
        lines = np.array([_line(by_size[size]) for size in sizes])  # [sizes, 2]
        weights = np.array([len(by_size[size]) for size in sizes], dtype=np.float64)
        knots = sorted({*GRID, *sizes})
        fixed, per_token = (_extended(sizes, isotonic(lines[:, part], weights), knots) for part in range(2))
        return cls(knots, fixed.tolist(), per_token.tolist(), trusted=sizes)

    @overload
    def step_time(self, nodes: int, context: int) -> float: ...
    @overload
    def step_time(self, nodes: NDArray[np.integer[Any]], context: int) -> NDArray[np.float64]: ...
    def step_time(self, nodes: int | NDArray[np.integer[Any]], context: int) -> float | NDArray[np.float64]:
        """Seconds of a step of `nodes` nodes, the root included, after `context` tokens of text.

        Before the first observation, and if nothing was measured, in steps of one node instead.
        """
        most = int(nodes if isinstance(nodes, int) else nodes.max(initial=1))
        fixed, per_token = self._up_to(most)
        if isinstance(nodes, int):
            return self.pace * float(fixed[nodes] + context * per_token[nodes])
        return np.asarray(self.pace * (fixed[nodes] + context * per_token[nodes]))

    def table(self, most: int) -> NDArray[np.float64]:
        """What `step_time` is made of, for steps of up to `most` nodes or more: a fixed part, and one for each token of
        text, `[2, nodes]`; both times `pace`. Not to be changed."""
        return self._up_to(most)

    @property
    def pace(self) -> float:
        """How long steps take lately, over what `table` says."""
        return 1.0 if self._pace is None else self._pace

    @overload
    def relative(self, nodes: int, context: int) -> float: ...
    @overload
    def relative(self, nodes: NDArray[np.integer[Any]], context: int) -> NDArray[np.float64]: ...
    def relative(self, nodes: int | NDArray[np.integer[Any]], context: int) -> float | NDArray[np.float64]:
        """Time of a step over that of a step of one node after the same text."""
        return self.step_time(nodes, context) / self.step_time(1, context)

    def observe(self, nodes: int, context: int, seconds: float) -> None:
        """Learn from a step that was run: its nodes, the text before it in tokens, and how long it took.

        A time that no step can have, such as 0 from a coarse clock, teaches nothing.
        """
        if nodes < 1 or not 0 < seconds < math.inf:
            return
        with self._lock:
            self._observe(nodes, context, seconds)

    def _observe(self, nodes: int, context: int, seconds: float) -> None:
        place = bucket(nodes)
        expected = self._expected(nodes, context)
        pace = seconds / expected if self._pace is None else self._pace
        if self._counts[place] >= TRUST:  # else the surprise is about this size
            pace = self._adjusted(pace, math.log(seconds / (pace * expected * self._medians[place])))
        self._pace = pace
        ratio = seconds / (pace * expected)
        ratios = self._ratios[place]
        ratios.append(ratio)
        self.observed += 1
        if len(ratios) > MEMORY:
            del ratios[0]
        self._counts[place] += 1
        # The lower middle: what disturbs a step only ever makes it longer.
        median = sorted(ratios)[(len(ratios) - 1) // 2]
        # The first observations change how much a size leans on its neighbours, whatever they say.
        if len(ratios) <= TRUST or abs(median - self._medians[place]) > SMALLEST_CHANGE * self._medians[place]:
            self._medians[place] = median
            self._changed = True

    def take_after(self, other: CostModel) -> None:
        """Expect what another model has learned, until steps of its own show better.

        Nothing changes if steps were observed already, or if `other` has seen none.
        """
        if self.observed or not other.observed:
            return
        fixed, per_token = (part[list(GRID)] for part in other._up_to(GRID[-1]))
        with self._lock:
            self._knots, self._pace = np.array(GRID, dtype=np.float64), other._pace
            self._fixed, self._per_token, self._trusted = _rising(fixed), _rising(per_token), []
            self._ratios, self._counts, self._medians = [[] for _ in GRID], [0] * len(GRID), [1.0] * len(GRID)
            self._changed = True

    def evidence(self, nodes: int) -> int:
        """How many steps of about this size were observed; one that `fit` was given counts as `TRUST` of them."""
        return self._counts[bucket(nodes)]

    @property
    def in_seconds(self) -> bool:
        """Whether `step_time` is in seconds; else nothing was measured or observed yet."""
        return self._pace is not None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and lists, ready for JSON."""
        return {
            "format": _FORMAT,
            "knots": self._knots.astype(int).tolist(),
            "fixed": self._fixed.tolist(),
            "per_token": self._per_token.tolist(),
            "pace": self._pace,
            "trusted": self._trusted,
            "observed": {
                str(size): {"count": count, "ratios": ratios}
                for size, count, ratios in zip(GRID, self._counts, self._ratios, strict=True)
                if count
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The model that `to_dict` described.

        Raises:
            InvalidArgumentError: The values are not from `to_dict`, or from one of another version.
        """
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
            raise InvalidArgumentError(f"values is no cost model of format {_FORMAT}; measure it again")
        try:
            model = cls(values["knots"], values["fixed"], values["per_token"], values["pace"], values["trusted"])
            for size, seen in values["observed"].items():
                place, ratios = GRID.index(int(size)), [float(ratio) for ratio in seen["ratios"]]
                if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
                    raise ValueError(f"size {size} has ratios {ratios}")
                model._ratios[place], model._counts[place] = ratios[-MEMORY:], int(seen["count"])
                model._medians[place] = sorted(model._ratios[place])[(len(model._ratios[place]) - 1) // 2]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"values is no cost model ({error}); measure it again") from error
        return model

    def _adjusted(self, pace: float, surprise: float) -> float:
        """The pace after a surprise, in natural logarithms: it follows what the last steps have in common."""
        self._surprises.append(surprise)
        if len(self._surprises) < RECENT:
            return pace
        del self._surprises[:-RECENT]
        step = PACE_GAIN * sorted(self._surprises)[RECENT // 2]
        step = min(max(step, -PACE_CLIP), PACE_CLIP)
        self._surprises = [surprise - step for surprise in self._surprises]
        return pace * math.exp(step)

    def _expected(self, nodes: int, context: int) -> float:
        """Time without correction and pace; one size at a time, where numpy would be slower."""
        knots = self._knots
        after = int(knots.searchsorted(nodes))
        if after == 0 or after == len(knots):
            place = min(after, len(knots) - 1)
            return float(self._fixed[place] + context * self._per_token[place])
        share = (nodes - knots[after - 1]) / (knots[after] - knots[after - 1])
        low = self._fixed[after - 1] + context * self._per_token[after - 1]
        high = self._fixed[after] + context * self._per_token[after]
        return float(low + share * (high - low))

    def _up_to(self, most: int) -> NDArray[np.float64]:
        """The table `[2, sizes]` of fixed and per-token seconds, without the pace, at least up to `most` nodes."""
        with self._lock:
            if (self._changed and self.observed >= self._due) or self._table.shape[1] <= most:
                size = max(257, self._table.shape[1], 1 << most.bit_length())
                self._table = self._build(size)
                self._changed = False
                self._due = self.observed + min(self.observed // OVERDUE, OVERDUE)
            return self._table

    def _build(self, size: int) -> NDArray[np.float64]:
        correction = np.exp(np.interp(np.log(self._knots), _LOG_GRID, self._corrections()))
        weights = np.interp(self._knots, GRID, np.array(self._counts, dtype=np.float64)) + 0.1
        sizes = np.arange(size)
        table = np.empty((2, size))
        for row, part in enumerate((self._fixed, self._per_token)):
            values = self._straight_on(isotonic(part * correction, weights)) if part.any() else part
            table[row] = np.interp(sizes, self._knots, values)
            beyond = sizes > self._knots[-1]
            table[row, beyond] = values[-1] * sizes[beyond] / self._knots[-1]
        return table

    def _straight_on(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Times at all knots, those beyond the largest size seen no larger than a straight line says.

        What was expected there may rise far too fast, where rows cost more than nodes do; and what looks slow is never
        tried. The line goes on with the steeper of two slopes, the last one and the mean one.
        """
        sizes = [GRID[place] for place, count in enumerate(self._counts) if count]
        if len(sizes) < 2 or sizes[-1] < FEW:
            return values
        seen = np.interp(sizes, self._knots, values)
        slopes = (seen[-1] - seen[-2]) / (sizes[-1] - sizes[-2]), (seen[-1] - seen[0]) / (sizes[-1] - sizes[0])
        line = seen[-1] + max(slopes) * (self._knots - sizes[-1])
        return np.where(self._knots > sizes[-1], np.minimum(values, line), values)

    def _corrections(self) -> NDArray[np.float64]:
        """Logarithm of the correction at each size of the grid: seen ones, and between them straight lines.

        Of a size seen k times, k / (k + 1) is what was seen and the rest what its neighbours would have it, until
        it is trusted. So one bad step cannot make a size look so slow that nobody tries it again.
        """
        seen = [place for place, count in enumerate(self._counts) if count]
        if not seen:
            return np.zeros(len(GRID))
        own = np.log([self._medians[place] for place in seen])
        settled = own.copy()
        for index, place in enumerate(seen):
            others = [other for other in range(len(seen)) if other != index]
            if self._counts[place] < TRUST and others:
                lean = float(np.interp(_LOG_GRID[place], _LOG_GRID[[seen[o] for o in others]], own[others]))
                settled[index] += (lean - own[index]) / (self._counts[place] + 1)
        return np.asarray(np.interp(_LOG_GRID, _LOG_GRID[seen], settled))


_LOG_GRID = np.log(np.array(GRID, dtype=np.float64))
_BORDERS = [(low * high) ** 0.5 for low, high in pairwise(GRID)]


def bucket(nodes: int) -> int:
    """The place in `GRID` of the size that is nearest to `nodes`, by ratio."""
    return bisect_left(_BORDERS, nodes)


def isotonic(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rising sequence nearest to `values`: neighbours in the wrong order become their weighted mean."""
    means: list[float] = []
    masses: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while means and means[-1] > value:
            mass = masses.pop()
            value = (means.pop() * mass + value * weight) / (mass + weight)
            weight += mass
            length += lengths.pop()
        means.append(value)
        masses.append(weight)
        lengths.append(length)
    return np.repeat(means, lengths)


def _line(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds without text and seconds per token of text, through (context, seconds); both at least 0.

    Differences count in relation to the time, or the longest context alone would decide.
    """
    contexts, seconds = np.array(measured, dtype=np.float64).T
    weights = 1 / seconds**2
    middle, level = np.average(contexts, weights=weights), np.average(seconds, weights=weights)
    spread = np.average((contexts - middle) ** 2, weights=weights)
    if spread == 0:
        return float(level), 0.0
    slope = np.average((contexts - middle) * (seconds - level), weights=weights) / spread
    slope = min(max(slope, 0.0), level / middle)
    return float(level - slope * middle), float(slope)


def _extended(sizes: Sequence[int], values: NDArray[np.float64], knots: Sequence[int]) -> NDArray[np.float64]:
    """Values at all knots, from those at `sizes`."""
    result = np.interp(knots, sizes, values)
    prior = np.array([_prior_time(knot) for knot in knots])
    below, beyond = np.array(knots) < sizes[0], np.array(knots) > sizes[-1]
    result[below] = values[0] * prior[below] / _prior_time(sizes[0])
    if sizes[-1] < FEW or len(sizes) == 1:
        result[beyond] = values[-1] * prior[beyond] / _prior_time(sizes[-1])
    else:
        last = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        mean = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
        result[beyond] += (np.array(knots)[beyond] - sizes[-1]) * max(last, mean)
    return np.asarray(result)


def _prior_time(nodes: int) -> float:
    """A guess of the time of a step, over that of a step of one node."""
    return 1 + 0.005 * (min(nodes, 8) - 1) + 0.012 * max(0, nodes - 8)


def _rising(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.maximum.accumulate(values))


def _check_curve(knots: Sequence[int], fixed: Sequence[float], per_token: Sequence[float], pace: float | None) -> None:
    if not knots or knots[0] != 1 or any(low >= high for low, high in pairwise(knots)):
        raise InvalidArgumentError(f"knots={list(knots)} must ascend from 1")
    for name, values in (("fixed", fixed), ("per_token", per_token)):
        if len(values) != len(knots) or not all(0 <= value < math.inf for value in values):
            raise InvalidArgumentError(f"{name}={list(values)} must be {len(knots)} numbers of at least 0, as knots is")
    if not all(one + more > 0 for one, more in zip(fixed, per_token, strict=True)):
        raise InvalidArgumentError(f"fixed={list(fixed)} says that some step takes no time at all")
    if pace is not None and not 0 < pace < math.inf:
        raise InvalidArgumentError(f"pace={pace} must be above 0, or None for one to be learned")
