"""Calibration of predicted acceptance probabilities, learned from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

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
        self._leans = leans
        self._bins, self._places = _Shares(BINS, PRIOR), _Shares(PLACES, PRIOR_OF_PLACES)

    def correct(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probabilities as they have turned out to be.

        Args:
            probabilities: Predicted for each candidate, descending, `[candidates]`.

        Returns:
            Corrected ones, descending and at most 1, `[candidates]`.
        """
        return np.minimum.accumulate(self._corrected(probabilities, _places(len(probabilities))))

    def correct_all(self, drafts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Those of several drafts, one after another; see `correct`."""
        probabilities = np.concatenate(drafts)
        places = np.concatenate([_places(len(draft)) for draft in drafts])
        below = np.repeat(2.0 * np.arange(len(drafts)), [len(draft) for draft in drafts])  # so that each descends alone
        return np.asarray(np.minimum.accumulate(self._corrected(probabilities, places) - below) + below)

    def predicted(self, probability: float) -> float:
        """The least that is predicted for a candidate that turns out to be at least so likely, wherever it stands."""
        for number, factor in enumerate(self._bins.factors.tolist()):
            most, least = 0.5 ** (number / 2), 0.5 ** ((number + 1) / 2)
            if least * factor < probability:
                return float(min(probability / factor, most))
        return 0.0

    def _corrected(self, probabilities: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
        by_bin = np.minimum(probabilities * self._bins.factors[_bins(probabilities)], 1.0)
        return np.minimum(by_bin * self._places.factors[places], 1.0)

    def learn(self, probabilities: NDArray[np.float64], accepted: Sequence[int]) -> None:
        """Learn from one draft.

        Args:
            probabilities: Predicted for each candidate that was sent, `[sent]`.
            accepted: Places in `probabilities` of those that were accepted.
        """
        self.learn_all([(probabilities, accepted)])

    def learn_all(self, drafts: Sequence[tuple[NDArray[np.float64], Sequence[int]]]) -> None:
        """Learn from several drafts at once; see `learn`."""
        probabilities = np.concatenate([predicted for predicted, _ in drafts])
        starts = np.cumsum([0, *(len(predicted) for predicted, _ in drafts)]).tolist()
        accepted = [start + place for start, (_, own) in zip(starts, drafts, strict=False) for place in own]
        bins, places = _bins(probabilities), np.concatenate([_places(len(predicted)) for predicted, _ in drafts])
        by_bin = np.minimum(probabilities * self._bins.factors[bins], 1.0)
        kept = DECAY ** len(drafts)
        self._bins.learn(bins, probabilities, accepted, kept, _NEAR if self._leans else None)
        self._places.learn(places, by_bin, accepted, kept)


class _Shares:
    """How often candidates of each class were accepted, over how often that was expected."""

    def __init__(self, classes: int, prior: float) -> None:
        self._prior = prior
        self.factors = np.ones(classes)
        self._expected = np.zeros(classes)
        self._accepted = np.zeros(classes)

    def learn(
        self,
        classes: NDArray[np.int64],
        expected: NDArray[np.float64],
        accepted: Sequence[int],
        kept: float,
        near: NDArray[np.float64] | None = None,
    ) -> None:
        """Learn the class of each candidate, its probability, and which were accepted; what was known keeps `kept` of
        its weight."""
        self._expected *= kept
        self._accepted *= kept
        self._expected += np.bincount(classes, expected, len(self.factors))
        for place in accepted:
            self._accepted[classes[place]] += 1
        leaning = 1.0 if near is None else (1 + near @ self._accepted) / (1 + near @ self._expected)
        self.factors = (self._accepted + self._prior * leaning) / (self._expected + self._prior)


_NEAR = 0.5 ** np.abs(np.subtract.outer(np.arange(BINS), np.arange(BINS)))
"""Weight of each bin for each other, `[bins, bins]`."""
np.fill_diagonal(_NEAR, 0)


def _bins(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    # 2^-9 lies in the last bin
    return np.asarray(-2 * np.log2(np.maximum(probabilities, 0.5 ** (BINS / 2 - 0.25))), dtype=np.int64)


@cache
def _places(count: int) -> NDArray[np.int64]:
    """The class of each place in a draft, by powers of two: 1, 2, 3 and 4, 5 to 8, ..."""
    return np.minimum(np.ceil(np.log2(np.arange(1, count + 1))), PLACES - 1).astype(np.int64)
