"""What temperature, top-k, top-p and min-p make of the model's distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_UNLISTED = 0.3
"""How likely a token that is not listed is taken to be at most, in the mean, over the last one that is."""


@dataclass(frozen=True)
class Shaping:
    """The changes that sampling makes to probabilities, in the order in which transformers makes them.

    Attributes:
        temperature: Divides the logits. Above 0.
        top_k: Only so many of the likeliest tokens are left, 0 for all.
        top_p: Only the likeliest tokens that together are at least this probable are left.
        min_p: Only tokens at least this many times as probable as the likeliest one are left.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether anything is different afterwards."""
        return self != Shaping()

    def apply(
        self, top_ids: NDArray[np.int64], top_probabilities: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest tokens as they are sampled. What the rest of the vocabulary holds is estimated.

        Args:
            top_ids: The likeliest tokens after each node, likeliest first, `[nodes, listed]`; -1 where there are none.
            top_probabilities: Their probabilities, `[nodes, listed]`; 0 likewise.

        Returns:
            The same of the shaped distribution; -1 and 0 for tokens that are not sampled.
        """
        listed = top_ids.shape[1]
        if not self.changes or not listed:
            return top_ids, top_probabilities
        exponent = 1 / self.temperature
        shares = top_probabilities.astype(np.float64)
        # Of the tokens that are not listed only their sum is known, and that each is below the last one listed.
        rest, least = np.maximum(1 - shares.sum(axis=1), 0), np.maximum(_UNLISTED * shares[:, -1], 1e-9)
        likeliest = np.maximum(shares[:, 0], 1e-9)  # counts 1, so that no power of it vanishes
        rest = np.minimum(rest / least, 1e9) * np.minimum(least / likeliest, 1.0) ** exponent  # so many tokens
        shares = (shares / likeliest[:, None]) ** exponent
        if self.top_k:
            shares[:, self.top_k :] = 0
            rest = np.minimum(rest, max(self.top_k - listed, 0) * shares[:, -1])
        whole = np.maximum(shares.sum(axis=1) + rest, 1e-30)
        shares /= whole[:, None]
        rest /= whole
        if self.top_p < 1:
            before = np.cumsum(shares, axis=1) - shares
            shares[before >= self.top_p] = 0
            shares[:, 0] = np.maximum(shares[:, 0], 1e-30 * (top_ids[:, 0] >= 0))
            rest = np.minimum(rest, np.maximum(self.top_p - shares.sum(axis=1), 0))
        if self.min_p:
            least = self.min_p * shares[:, 0]
            shares[shares < least[:, None]] = 0
            rest[shares[:, -1] <= least] = 0
        shares /= np.maximum(shares.sum(axis=1) + rest, 1e-30)[:, None]
        sampled = shares.astype(np.float32)
        return np.where(sampled > 0, top_ids, -1), sampled
