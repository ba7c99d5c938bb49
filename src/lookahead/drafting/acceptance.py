"""How likely a proposal is to be accepted: learned while decoding, from every node that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MATCH_CLASSES = (2, 3, 4, 6, 9, 16)
"""Fewest agreeing tokens of each class of context matches."""

_OWN_WEIGHT, _OTHER_WEIGHT = 0.6, 0.15
_MATCH_WEIGHTS = (0.8, 1.4, 2.0, 2.7, 3.5, 4.5)
_REPEATED_WEIGHT = 0.1
_NOTHING_KNOWN, _ONE_TOKEN_KNOWN, _MORE_KNOWN = -2.0, -0.5, -2.4
"""Where learning begins. Two models of 0.3 and 6 million parameters, on stories, code and instructions, came to
weights within about 0.1 of these."""


class Acceptance:
    """The probability that the target names a token after a node, from what the sources say about it.

    A conditional logit: token t scores s(t) = w · x(t), "none of those proposed" scores a constant b, and the
    probabilities are their softmax. The features x(t) are the log-probability that the memory gives t after the last
    1, 2, ... tokens; the class of the longest context match that t follows (one of six is 1, the others 0); and half
    the number of further matches that it follows. There is one set of w and b for each length of the longest
    context that the memory knows. So the lengths are blended, not just backed off from, with learned weights.

    Every node of a step for which tokens were proposed is a lesson, since the model says what comes after it; those
    on the accepted path count in full, others less. One AdaGrad step is taken for each step.

    Args:
        orders: Longest context of the memory.
        rate: Learning rate of AdaGrad. 0 learns nothing.
        off_path: What a node beside the accepted path counts, from 0 to 1.

    Attributes:
        weights: `[orders + 1, features + 1]` float64: w and, in the last column, b, for each length of the longest
            known context, 0 included.
    """

    def __init__(self, orders: int, rate: float = 0.1, off_path: float = 0.3) -> None:
        self.orders = orders
        self.rate = rate
        self.off_path = off_path
        self.weights = np.zeros((orders + 1, self.features + 1))
        for longest in range(orders + 1):
            row = self.weights[longest]
            row[: max(longest - 1, 0)] = _OTHER_WEIGHT
            row[max(longest - 1, 0) : longest] = _OWN_WEIGHT
            row[orders:-2] = _MATCH_WEIGHTS
            row[-2] = _REPEATED_WEIGHT
            row[-1] = (_NOTHING_KNOWN, _ONE_TOKEN_KNOWN)[longest] if longest < 2 else _MORE_KNOWN
        self._squares = np.ones_like(self.weights)

    @property
    def features(self) -> int:
        """Features of a proposal."""
        return self.orders + len(MATCH_CLASSES) + 1

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that was learned, as arrays by name, for a file."""
        return {
            "acceptance_settings": np.array([self.rate, self.off_path]),
            "acceptance_weights": self.weights,
            "acceptance_squares": self._squares,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Acceptance:
        """What `to_arrays` gave.

        Raises:
            KeyError: An array is missing.
            ValueError: The arrays do not belong together.
        """
        rate, off_path = (float(value) for value in arrays["acceptance_settings"])
        acceptance = cls(len(arrays["acceptance_weights"]) - 1, rate, off_path)
        acceptance.weights[:] = arrays["acceptance_weights"]
        acceptance._squares[:] = arrays["acceptance_squares"]
        return acceptance

    def learn(
        self,
        features: NDArray[np.float64],
        estimates: NDArray[np.float64],
        outcomes: NDArray[np.float64],
        starts: NDArray[np.int64],
        longest: NDArray[np.int64],
        counts: NDArray[np.float64],
    ) -> None:
        """Learn from one step.

        Args:
            features: What spoke for each proposal, `[proposals, features]`; those of one node stand together.
            estimates: The probability that it was given, `[proposals]`.
            outcomes: The probability that it turned out to have: 1 where the target names it, else 0, `[proposals]`.
            starts: Where the proposals of each node begin, `[nodes]`, ascending; each node has at least one.
            longest: Length of the longest context that the memory knew at each node, `[nodes]`.
            counts: How much each node counts, `[nodes]`.
        """
        if not len(starts) or not self.rate:
            return
        errors = outcomes - estimates
        gradient = np.empty((len(starts), self.weights.shape[1]))
        gradient[:, :-1] = np.add.reduceat(errors[:, None] * features, starts, axis=0)
        gradient[:, -1] = -np.add.reduceat(errors, starts)
        gradient *= counts[:, None]
        members = (np.arange(len(self.weights))[:, None] == longest).astype(np.float64)
        self._squares += members @ (gradient * gradient)
        self.weights += self.rate * (members @ gradient) / np.sqrt(self._squares)
