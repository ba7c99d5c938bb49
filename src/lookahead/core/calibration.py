"""Calibration of predicted acceptance probabilities, learned from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log2

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner

BINS = 18
"""Bins of predicted probability, each half a power of two wide; the last one holds all that is smaller."""

PLACES = 8
"""Classes of places in a draft: 1, 2, 3 and 4, ..., 65 and beyond."""

PRIOR = 2.0
"""Accepted candidates that each bin begins with, as if they had been predicted rightly, or as those near it were."""

PRIOR_OF_PLACES = 8.0
"""The same for each class of places: more, as what is wrong there is wrong of long runs alone."""

DECAY = 0.998
"""What evidence keeps of its weight from one draft to the next, so that some 500 drafts count."""


class Calibration:
    """Corrects the probabilities that a draft was given by how often such drafts were accepted.

    Candidates are counted in bins of predicted probability. Where those of a bin were accepted half as often as was
    predicted, the probabilities of that bin count half. What is left is corrected by the place in the draft: each token
    of a long run is sure once the one before it is right, so that all have nearly the same probability, but the last
    ones come true more rarely than the first ones.

    Args:
        leans: Whether a bin that has seen little goes by those near it. Of chains, whose tokens are wrong together,
            each bin would else have to see a long one fail.
    """

    def __init__(self, leans: bool = False) -> None:
        self._near = _NEAR if leans else np.zeros_like(_NEAR)
        self._bins, self._places = np.zeros((3, BINS)), np.zeros((3, PLACES))
        self._bins[_FACTOR] = self._places[_FACTOR] = 1.0

    def correct(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probabilities as they have turned out to be.

        Args:
            probabilities: Predicted for each candidate, descending, `[candidates]`.

        Returns:
            Corrected ones, descending and at most 1, `[candidates]`.
        """
        return self.correct_all([probabilities])

    def correct_all(self, drafts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Those of several drafts, one after another; see `correct`."""
        probabilities, ends = _one_after_another(drafts)
        corrected = np.empty_like(probabilities)
        _correct(probabilities, ends, self._bins, self._places, corrected)
        return corrected

    def predicted(self, probability: float) -> float:
        """The least that is predicted for a candidate that turns out to be at least so likely, wherever it stands."""
        return _predicted(probability, self._bins)

    def learn(self, probabilities: NDArray[np.float64], accepted: Sequence[int]) -> None:
        """Learn from one draft.

        Args:
            probabilities: Predicted for each candidate that was sent, `[sent]`.
            accepted: Places in `probabilities` of those that were accepted.
        """
        self.learn_all([(probabilities, accepted)])

    def learn_all(self, drafts: Sequence[tuple[NDArray[np.float64], Sequence[int]]]) -> None:
        """Learn from several drafts at once; see `learn`."""
        probabilities, ends = _one_after_another([predicted for predicted, _ in drafts])
        begins = [0, *ends.tolist()]
        accepted = [begin + place for begin, (_, own) in zip(begins, drafts, strict=False) for place in sorted(own)]
        kept = DECAY ** len(drafts)
        _learn(probabilities, ends, np.array(accepted, dtype=np.int64), kept, self._near, self._bins, self._places)


def _one_after_another(drafts: Sequence[NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Several arrays in one, and where each of them ends."""
    return np.concatenate(drafts), np.array(list(accumulate(map(len, drafts))), dtype=np.int64)


_LEAST = 0.5 ** (BINS / 2 - 0.25)
"""What is less likely lies in the last bin, as 2^-9 does."""

_EXPECTED, _ACCEPTED, _FACTOR = range(3)
"""Of each class: candidates that were expected to be accepted, that were, and by how much what is predicted counts."""

_NEAR = 0.5 ** np.abs(np.subtract.outer(np.arange(BINS), np.arange(BINS)))
"""Weight of each bin for each other, `[bins, bins]`."""
np.fill_diagonal(_NEAR, 0)


@inner
def _bin(probability: float) -> int:
    if not probability > _LEAST:  # nor a number
        return BINS - 1
    return int(-2 * log2(min(probability, 1.0)))


@inner
def _place(before: int) -> int:
    """The class of a place in a draft that has so many before it, by powers of two: 1, 2, 3 and 4, 5 to 8, ..."""
    place = 0
    while place < PLACES - 1 and (1 << place) <= before:
        place += 1
    return place


@inner
def _by_bin(probability: float, bins: NDArray[np.float64]) -> float:
    return float(min(probability * bins[_FACTOR, _bin(probability)], 1.0))


@inner
def _fade(classes: NDArray[np.float64], kept: float) -> None:
    for number in range(classes.shape[1]):
        classes[_EXPECTED, number] *= kept
        classes[_ACCEPTED, number] *= kept


@inner
def _settle(classes: NDArray[np.float64], number: int, true: float, expected: float) -> None:
    """The factor of a class, which began with so many that were accepted, and so many that were expected to be."""
    classes[_FACTOR, number] = (classes[_ACCEPTED, number] + true) / (classes[_EXPECTED, number] + expected)


@compiled
def _correct(
    probabilities: NDArray[np.float64],
    ends: NDArray[np.int64],
    bins: NDArray[np.float64],
    places: NDArray[np.float64],
    corrected: NDArray[np.float64],
) -> None:
    begin = 0
    for end in ends:
        least = 1.0
        for index in range(begin, end):
            least = min(least, _by_bin(probabilities[index], bins) * places[_FACTOR, _place(index - begin)])
            corrected[index] = least
        begin = end


@compiled
def _predicted(probability: float, bins: NDArray[np.float64]) -> float:
    for number in range(BINS):
        factor = bins[_FACTOR, number]
        if 0.5 ** ((number + 1) / 2) * factor < probability:
            return float(min(probability / factor, 0.5 ** (number / 2)))
    return 0.0


@compiled
def _learn(
    probabilities: NDArray[np.float64],
    ends: NDArray[np.int64],
    accepted: NDArray[np.int64],
    kept: float,
    near: NDArray[np.float64],
    bins: NDArray[np.float64],
    places: NDArray[np.float64],
) -> None:
    """Count drafts, whose accepted candidates ascend; what was known keeps `kept` of its weight."""
    _fade(bins, kept)
    _fade(places, kept)
    begin = following = 0
    for end in ends:
        for index in range(begin, end):
            in_bin, place = _bin(probabilities[index]), _place(index - begin)
            bins[_EXPECTED, in_bin] += probabilities[index]
            places[_EXPECTED, place] += _by_bin(probabilities[index], bins)
            if following < len(accepted) and accepted[following] == index:
                bins[_ACCEPTED, in_bin] += 1
                places[_ACCEPTED, place] += 1
                following += 1
        begin = end
    for number in range(BINS):
        true = expected = 1.0
        for other in range(BINS):
            true += near[number, other] * bins[_ACCEPTED, other]
            expected += near[number, other] * bins[_EXPECTED, other]
        _settle(bins, number, PRIOR * true / expected, PRIOR)
    for number in range(PLACES):
        _settle(places, number, PRIOR_OF_PLACES, PRIOR_OF_PLACES)
