"""How likely a proposal is to be accepted: learned while decoding, from every node that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner, loop_arrays, loop_tuple
from lookahead.drafting.auto.context_matches import MATCH_CLASSES
from lookahead.drafting.auto.priors import PRIORS
from lookahead.drafting.auto.proposals import Proposals
from lookahead.drafting.stored_arrays import DamagedFileError, expect

NOTHING = "nothing"
"""All tokens that no source proposed; its weight is in column 0."""

MATCHES = tuple(f"match of {length} tokens" for length in MATCH_CLASSES)
FURTHER_MATCHES, NEIGHBOURS, SIBLINGS = "further matches", "neighbours", "rejected siblings"

_OWN_PRIOR = 0.5
"""Initial weight of a user-defined source: its probabilities count half."""


def context_name(length: int) -> str:
    """The feature of what the memory says after contexts of so many tokens."""
    return f"after {length} token{'s' if length > 1 else ''}"


def feature_names(orders: int) -> list[str]:
    """The features of the library's own sources, in the order of their columns."""
    contexts = [context_name(length) for length in range(1, orders + 1)]
    return [NOTHING, *contexts, *MATCHES, FURTHER_MATCHES, NEIGHBOURS, SIBLINGS]


class Acceptance:
    """The probability that a token is selected after a node, from the evidence of the sources.

    A conditional logit: token t scores s(t) = w · x(t), "none of those proposed" scores a constant b, and the
    probabilities are their softmax. The features x(t) are the log-probability that the memory gives t after the last
    1, 2, ... tokens; the class of the longest context match that t follows (one of eight is 1, the others 0); half the
    number of further matches that it follows; the log-probability that the neighbours of a last token which the memory
    does not know give it; the one that rejected-sibling continuations give it after the root; and the one that each
    user-defined source gives it. There is one set of w and b for each length of the longest context that the memory
    knows. So the lengths are blended, not just backed off from, with learned weights.

    Every node of a step for which tokens were proposed is a lesson, since the model says what comes after it; those
    on the accepted path count in full, others less. One AdaGrad step is taken for each step.

    Args:
        orders: Longest context of the memory.
        rate: Learning rate of AdaGrad. 0 learns nothing.
        off_path: What a node beside the accepted path counts, from 0 to 1.
        priors: The weights to begin with, by feature, for each length of the longest known context.

    Attributes:
        names: Feature of each column; the first is `NOTHING`.
        weights: `[orders + 1, columns]` float64: b in column 0, and w, for each length of the longest known context, 0
            included.
        squares: One more than the sum of squared gradients of each weight, as AdaGrad keeps them, likewise.
    """

    def __init__(
        self, orders: int, rate: float = 0.1, off_path: float = 0.3, priors: Mapping[str, Sequence[float]] = PRIORS
    ) -> None:
        self._priors = priors
        self._longest_prior = len(priors[NOTHING]) - 1
        self.orders = orders
        self.rate = rate
        self.off_path = off_path
        self.names: list[str] = []
        self.weights = np.zeros((orders + 1, 0))
        self.squares = self.weights
        self._add(feature_names(orders))
        known = self._longest_prior
        if orders > known:  # the longest context counts as the longest of the table does
            column = self.column(context_name(known))
            for longest in range(known + 1, orders + 1):
                self.weights[longest, self.column(context_name(longest))] = self.weights[longest, column]
                self.weights[longest, column] = 0.0

    def column(self, name: str) -> int:
        """The column of a feature; a new one if it has none, with a prior weight."""
        if name not in self.names:
            self._add([name])
        return self.names.index(name)

    def _add(self, names: list[str]) -> None:
        rows = np.minimum(np.arange(self.orders + 1), self._longest_prior)
        new = np.zeros((self.orders + 1, len(names)))
        for column, name in enumerate(names):
            is_unknown_context = name not in self._priors and name in feature_names(self.orders)
            own = (0.0 if is_unknown_context else _OWN_PRIOR,) * (self._longest_prior + 1)
            new[:, column] = np.array(self._priors.get(name, own))[rows]
        self.names = [*self.names, *names]
        self.weights = np.concatenate([self.weights, new], axis=1)
        self.squares = np.concatenate([self.squares, np.ones_like(new)], axis=1)

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that was learned, as arrays by name, for a file."""
        return {
            "acceptance_settings": np.array([self.rate, self.off_path]),
            "acceptance_names": np.array(self.names),
            "acceptance_weights": self.weights.copy(),
            "acceptance_squares": self.squares.copy(),
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
        acceptance = cls(len(weights) - 1, rate, off_path) if 1 < len(weights) <= weights.shape[1] else None
        if acceptance is None or squares.size == 0 or squares.min() <= 0:
            raise DamagedFileError("its arrays do not belong together")
        names = acceptance.names
        if "acceptance_names" in arrays:
            stored = arrays["acceptance_names"]
            names = expect(arrays, "acceptance_names", stored.dtype, (weights.shape[1],)).tolist()
        else:  # written before features had names: b came last
            weights, squares = np.roll(weights, 1, axis=1), np.roll(squares, 1, axis=1)
        if names[: len(acceptance.names)] != acceptance.names or len({*names}) != weights.shape[1]:
            raise DamagedFileError("its arrays do not belong together")
        acceptance._add(names[len(acceptance.names) :])
        acceptance.weights[:] = weights
        acceptance.squares[:] = squares
        return acceptance

    def merge(self, other: Acceptance, base: Acceptance) -> None:
        """Take in what another one learned beside this one since both were `base`.

        Each weight moves from `base` by the mean of what both moved it by; each counts by the gradients that it saw.
        """
        for name in dict.fromkeys([*self.names, *other.names, *base.names]):
            for each in (self, other, base):
                each.column(name)
        theirs, before = ([each.names.index(name) for name in self.names] for each in (other, base))
        weights, squares = base.weights[:, before], base.squares[:, before]
        own = np.maximum(self.squares - squares, 0)
        others = np.maximum(other.squares[:, theirs] - squares, 0)
        both = own + others
        moved = own * (self.weights - weights) + others * (other.weights[:, theirs] - weights)
        told = others > 0
        self.weights[told] = (weights + moved / np.where(both > 0, both, 1))[told]
        self.squares[told] = (squares + both)[told]

    def learn(self, lessons: Lessons) -> None:
        """Learn from one step."""
        if len(lessons.starts) and self.rate:
            room = np.empty_like(self.weights), np.empty(lessons.features.shape[1])
            weights, squares, gradient, own = loop_arrays(self.weights, self.squares, *room)
            ascend(self.rate, weights, squares, loop_tuple(lessons), gradient, own)


class Evidence(NamedTuple):
    """The first column of the memory, of matches, and of all other sources."""

    memory: int
    matches: int
    others: int


def evidence_of(acceptance: Acceptance) -> Evidence:
    """Where the features of each source are."""
    return Evidence(*(acceptance.column(name) for name in (context_name(1), MATCHES[0], NEIGHBOURS)))


class Lessons(NamedTuple):
    """The outcomes of the proposals of one step.

    Attributes:
        features: What spoke for each proposal, `[proposals, columns]`; those of one node stand together.
        estimates: The probability that it was given, `[proposals]`.
        outcomes: The probability that it turned out to have: 1 where it is selected, else 0, `[proposals]`.
        starts: Where the proposals of each node begin, `[nodes]`, ascending; each node has at least one.
        known: Length of the longest context that the memory knew at each node, `[nodes]`.
        counts: How much each node counts, `[nodes]`.
    """

    features: NDArray[np.float64]
    estimates: NDArray[np.float64]
    outcomes: NDArray[np.float64]
    starts: NDArray[np.int64]
    known: NDArray[np.int64]
    counts: NDArray[np.float64]


@inner
def estimate(begin: int, end: int, known: int, weights: NDArray[np.float64], proposals: Proposals) -> None:
    """Write the probabilities of the proposals of one node, from `begin` to before `end`.

    `known` is the length of the longest context of the node that the memory knows.
    """
    nothing = weights[known, 0]
    top = nothing
    for row in range(begin, end):
        score = 0.0
        for column in range(1, proposals.features.shape[1]):
            score += proposals.features[row, column] * weights[known, column]
        proposals.estimates[row] = score
        top = max(top, score)
    mass = exp(nothing - top)
    for row in range(begin, end):
        proposals.estimates[row] = exp(proposals.estimates[row] - top)
        mass += proposals.estimates[row]
    for row in range(begin, end):
        proposals.estimates[row] /= mass


@compiled
def ascend(
    rate: float,
    weights: NDArray[np.float64],
    squares: NDArray[np.float64],
    lessons: Lessons,
    gradient: NDArray[np.float64],
    own: NDArray[np.float64],
) -> None:
    """One AdaGrad step; `gradient` and `own` are room for all gradients and for that of one node."""
    columns = lessons.features.shape[1]
    for row in range(weights.shape[0]):
        for column in range(columns):
            gradient[row, column] = 0.0
    for node in range(len(lessons.starts)):
        for column in range(columns):
            own[column] = 0.0
        last = node + 1 == len(lessons.starts)
        end = len(lessons.estimates) if last else lessons.starts[node + 1]
        for proposal in range(lessons.starts[node], end):
            error = lessons.outcomes[proposal] - lessons.estimates[proposal]
            own[0] -= error
            for column in range(1, columns):
                own[column] += error * lessons.features[proposal, column]
        for column in range(columns):
            slope = lessons.counts[node] * own[column]
            gradient[lessons.known[node], column] += slope
            squares[lessons.known[node], column] += slope * slope
    for row in range(weights.shape[0]):
        for column in range(columns):
            weights[row, column] += rate * gradient[row, column] / sqrt(squares[row, column])
