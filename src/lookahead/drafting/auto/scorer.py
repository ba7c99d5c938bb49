"""How likely a proposal is to be accepted: learned while decoding, from every node that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.compiled import compiled, loop_arrays
from lookahead.drafting.stored_arrays import DamagedFileError, expect

MATCH_CLASSES = (2, 3, 4, 6, 9, 16, 24, 32)
"""Fewest agreeing tokens of each class of context matches."""

OTHER_FEATURES = 3
"""Features that follow those of the context lengths and of the matches, in this order: how many further matches, what
neighbours say, what rejected-sibling continuations say."""

_PRIORS = (
    # contexts of 1 to 4 tokens, then matches, then the other features, then "none of those"
    (0.00, 0.00, 0.00, 0.00, 3.75, 3.47, 4.54, 4.85, 5.58, 5.77, 4.91, 6.59, 0.44, 0.45, 0.12, 0.82),
    (0.79, 0.00, 0.00, 0.00, 2.49, 2.78, 3.38, 3.23, 4.94, 5.78, 4.85, 6.59, 0.50, 0.45, 0.03, -0.99),
    (0.45, 0.56, 0.00, 0.00, 1.53, 2.53, 3.28, 3.33, 4.69, 5.62, 4.88, 6.59, -0.26, 0.45, 0.01, -3.01),
    (0.50, 0.11, 0.44, 0.00, 1.40, 2.19, 2.56, 3.47, 4.51, 5.73, 4.81, 6.59, -0.40, 0.45, -0.02, -3.08),
    (0.43, 0.01, 0.04, 0.50, 1.32, 1.91, 2.16, 2.48, 3.42, 4.88, 4.90, 6.66, -0.07, 0.45, -0.02, -3.26),
)
"""Where learning begins, for each length of the longest known context. Fitted to what two models of 0.3 and 6 million
parameters said after stories, code, questions and instructions, other ones than those of the benchmarks."""

_KNOWN_PRIORS = len(_PRIORS) - 1


class Acceptance:
    """The probability that the target names a token after a node, from what the sources say about it.

    A conditional logit: token t scores s(t) = w · x(t), "none of those proposed" scores a constant b, and the
    probabilities are their softmax. The features x(t) are the log-probability that the memory gives t after the last
    1, 2, ... tokens; the class of the longest context match that t follows (one of eight is 1, the others 0); half the
    number of further matches that it follows; the log-probability that the neighbours of a last token which the memory
    does not know give it; and, after the root, the one that rejected-sibling continuations give it. There is one
    set of w and b for each length of the longest context that the memory knows. So the lengths are blended, not
    just backed off
    from, with learned weights.

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
            prior = _PRIORS[min(longest, _KNOWN_PRIORS)]
            row = self.weights[longest]
            row[: min(orders, _KNOWN_PRIORS)] = prior[: min(orders, _KNOWN_PRIORS)]
            row[orders:] = prior[_KNOWN_PRIORS:]
            if longest > _KNOWN_PRIORS:  # the longest context counts as the longest of the table does
                row[_KNOWN_PRIORS - 1], row[longest - 1] = 0.0, prior[_KNOWN_PRIORS - 1]
        self._squares = np.ones_like(self.weights)

    @property
    def features(self) -> int:
        """Features of a proposal."""
        return self.orders + len(MATCH_CLASSES) + OTHER_FEATURES

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that was learned, as arrays by name, for a file."""
        return {
            "acceptance_settings": np.array([self.rate, self.off_path]),
            "acceptance_weights": self.weights.copy(),
            "acceptance_squares": self._squares.copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Acceptance:
        """What `to_arrays` gave.

        Raises:
            DamagedFileError: An array is missing, or they cannot be from there.
        """
        rate, off_path = expect(arrays, "acceptance_settings", np.float64, (2,)).tolist()
        weights = expect(arrays, "acceptance_weights", np.float64, (None, None))
        squares = expect(arrays, "acceptance_squares", np.float64, weights.shape)
        orders = len(weights) - 1
        if orders < 1 or weights.shape[1] != orders + len(MATCH_CLASSES) + OTHER_FEATURES + 1 or squares.min() <= 0:
            raise DamagedFileError("its arrays do not belong together")
        acceptance = cls(orders, rate, off_path)
        acceptance.weights[:] = weights
        acceptance._squares[:] = squares
        return acceptance

    def merge(self, other: Acceptance, base: Acceptance) -> None:
        """Take in what another one learned beside this one since both were `base`.

        Each weight moves from `base` by the mean of what both moved it by; each counts by the gradients that it saw.
        """
        own, others = (np.maximum(learned._squares - base._squares, 0) for learned in (self, other))
        both = own + others
        moved = own * (self.weights - base.weights) + others * (other.weights - base.weights)
        told = others > 0
        self.weights[told] = (base.weights + moved / np.where(both > 0, both, 1))[told]
        self._squares[told] = (base._squares + both)[told]

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
        arrays = (self.weights, self._squares, features, estimates, outcomes, starts, longest, counts)
        _ascend(self.rate, *loop_arrays(*arrays, np.empty_like(self.weights), np.empty(self.weights.shape[1])))


@compiled
def _ascend(
    rate: float,
    weights: NDArray[np.float64],
    squares: NDArray[np.float64],
    features: NDArray[np.float64],
    estimates: NDArray[np.float64],
    outcomes: NDArray[np.float64],
    starts: NDArray[np.int64],
    longest: NDArray[np.int64],
    counts: NDArray[np.float64],
    gradient: NDArray[np.float64],
    own: NDArray[np.float64],
) -> None:
    """One AdaGrad step; `gradient` and `own` are room for all gradients and for that of one node."""
    columns = weights.shape[1]
    for row in range(weights.shape[0]):
        for column in range(columns):
            gradient[row, column] = 0.0
    for node in range(len(starts)):
        for column in range(columns):
            own[column] = 0.0
        end = starts[node + 1] if node + 1 < len(starts) else len(estimates)
        for proposal in range(starts[node], end):
            error = outcomes[proposal] - estimates[proposal]
            own[columns - 1] -= error
            for column in range(columns - 1):
                own[column] += error * features[proposal, column]
        for column in range(columns):
            slope = counts[node] * own[column]
            gradient[longest[node], column] += slope
            squares[longest[node], column] += slope * slope
    for row in range(weights.shape[0]):
        for column in range(columns):
            weights[row, column] += rate * gradient[row, column] / sqrt(squares[row, column])
