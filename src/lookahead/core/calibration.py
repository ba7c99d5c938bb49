"""Calibration of predicted acceptance probabilities, learned from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BINS = 18
"""Bins of predicted probability, each half a power of two wide; the last one holds all that is smaller."""

PRIOR = 2.0
"""Accepted candidates that each bin begins with, as if they had been predicted rightly, or as those near it were."""

DECAY = 0.998
"""What evidence keeps of its weight from one draft to the next, so that some 500 drafts count."""


class Calibration:
    """Corrects the probabilities that a draft was given by how often such drafts were accepted.

    Candidates are counted in bins of predicted probability. Where those of a bin were accepted half as often as was
    predicted, the probabilities of that bin count half.

    Args:
        leans: Whether a bin that has seen little goes by those near it. Of chains, whose tokens are wrong together,
            each bin would else have to see a long one fail.
    """

    def __init__(self, leans: bool = False) -> None:
        self._leans = leans
        self._expected = np.zeros(BINS)
        self._accepted = np.zeros(BINS)
        self._factors = np.ones(BINS)

    def correct(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probabilities as they have turned out to be.

        Args:
            probabilities: Predicted for each candidate, descending, `[candidates]`.

        Returns:
            Corrected ones, descending and at most 1, `[candidates]`.
        """
        corrected = np.minimum(probabilities * self._factors[_bins(probabilities)], 1.0)
        return np.minimum.accumulate(corrected)

    def learn(self, probabilities: NDArray[np.float64], accepted: Sequence[int]) -> None:
        """Learn from one draft.

        Args:
            probabilities: Predicted for each candidate that was sent, `[sent]`.
            accepted: Places in `probabilities` of those that were accepted.
        """
        self._expected *= DECAY
        self._accepted *= DECAY
        bins = _bins(probabilities)
        self._expected += np.bincount(bins, probabilities, BINS)
        for place in accepted:
            self._accepted[bins[place]] += 1
        near = (1 + _NEAR @ self._accepted) / (1 + _NEAR @ self._expected) if self._leans else 1.0
        self._factors = (self._accepted + PRIOR * near) / (self._expected + PRIOR)


_NEAR = 0.5 ** np.abs(np.subtract.outer(np.arange(BINS), np.arange(BINS)))
"""Weight of each bin for each other, `[bins, bins]`."""
np.fill_diagonal(_NEAR, 0)


def _bins(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    # 2^-9 lies in the last bin
    return np.asarray(-2 * np.log2(np.maximum(probabilities, 0.5 ** (BINS / 2 - 0.25))), dtype=np.int64)
