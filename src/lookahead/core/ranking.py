"""Ranking of the candidates of all rows by probability, so that a search skips unlikely ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner

_BINS = 256
"""Bins of probabilities in a ranking."""

_CAPACITY, _CUT, _ABOVE, _FIRST_BIN = range(4)
"""Indices in a ranking: its arguments `capacity`, the first bin that counts, candidates in it and above, and bin 0."""


def new_ranking(capacity: int) -> NDArray[np.int64]:
    """Return an empty ranking of the candidates of a step, of all rows: their numbers by probability.

    With it a search skips candidates that cannot be among the likeliest `capacity` of all rows.
    """
    ranking = np.zeros(_FIRST_BIN + _BINS + 1, dtype=np.int64)
    ranking[_CAPACITY] = capacity
    return ranking


UNRANKED = new_ranking(1 << 62)
"""Ranking that skips no candidate."""


@inner
def count_ranked(probability: float, ranking: NDArray[np.int64]) -> None:
    """Count a candidate."""
    place = int(probability * _BINS)
    if place < ranking[_CUT]:
        return
    ranking[_FIRST_BIN + place] += 1
    ranking[_ABOVE] += 1
    while ranking[_ABOVE] - ranking[_FIRST_BIN + ranking[_CUT]] >= ranking[_CAPACITY]:
        ranking[_ABOVE] -= ranking[_FIRST_BIN + ranking[_CUT]]
        ranking[_CUT] += 1


@inner
def least_ranked(ranking: NDArray[np.int64]) -> float:
    """Return the probability below which candidates are not among the likeliest."""
    return float(ranking[_CUT]) / _BINS
