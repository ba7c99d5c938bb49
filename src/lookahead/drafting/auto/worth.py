"""What the probabilities of each kind of evidence are worth now: how often it came true lately, where it counted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner
from lookahead.drafting.auto.context_matches import MATCH_CLASSES
from lookahead.drafting.auto.proposals import UNLISTED_LOG, Proposals

PRIOR = 4.0
"""Proposals of each kind that are counted beforehand, as if they had come true as often as they were to."""

KEPT = 0.97
"""What evidence keeps of its weight from one step that tells of its kind to the next."""

CHANCE = 0.75
"""Ratios between this and its inverse may be chance: estimates are left as they are."""

_LONG_MATCH = 3
"""First class of matches (of six tokens) that are long."""

MATCH_KINDS = 3
"""Kinds of matches: none, short, long."""


class Worth(NamedTuple):
    """Counts by kind of evidence: the match that a token follows, and the longest context after which the memory names
    it; for a token of which neither says anything, the source that lists it.

    Attributes:
        expected: How many proposals of each kind were to be selected on the walked path, by their estimates, `[kinds]`.
        selected: How many were, likewise.
        factors: By how much estimates are multiplied, likewise.
    """

    expected: NDArray[np.float64]
    selected: NDArray[np.float64]
    factors: NDArray[np.float64]


class Evidence(NamedTuple):
    """Where the features are that a kind is told by: the first of the memory, of matches, and of all other sources."""

    memory: int
    matches: int
    others: int


def allocate_worth(evidence: Evidence, columns: int) -> Worth:
    """Nothing is known yet."""
    kinds = MATCH_KINDS * (evidence.matches - evidence.memory + 1) + columns - evidence.others
    return Worth(np.full(kinds, PRIOR), np.full(kinds, PRIOR), np.ones(kinds))


@inner
def settle(worth: Worth, expected: NDArray[np.float64], selected: NDArray[np.float64]) -> None:
    """Add what a step showed of each kind, `[kinds]` each; what is older counts less then."""
    for kind in range(len(worth.factors)):
        if expected[kind] > 0:
            worth.expected[kind] = PRIOR + KEPT * (worth.expected[kind] - PRIOR) + expected[kind]
            worth.selected[kind] = PRIOR + KEPT * (worth.selected[kind] - PRIOR) + selected[kind]
        ratio = worth.selected[kind] / worth.expected[kind]
        worth.factors[kind] = ratio if ratio < CHANCE or ratio > 1 / CHANCE else 1.0


@inner
def _kind_of(row: int, proposals: Proposals, evidence: Evidence) -> int:
    """The kind of a proposal at the node at hand."""
    orders = evidence.matches - evidence.memory
    order = orders
    while order > 0:
        column = evidence.memory + order - 1
        if proposals.features[row, column] > proposals.defaults[column]:
            break
        order -= 1
    match = 0
    for index in range(len(MATCH_CLASSES)):
        if proposals.features[row, evidence.matches + index] > 0:
            match = 2 if index >= _LONG_MATCH else 1
    if order > 0 or match > 0:
        return int(match * (orders + 1) + order)
    for column in range(evidence.others, proposals.features.shape[1]):
        if proposals.features[row, column] > UNLISTED_LOG and proposals.defaults[column] < 0:
            return int(MATCH_KINDS * (orders + 1) + column - evidence.others)
    return 0


@inner
def believe(row: int, surest: float, proposals: Proposals, evidence: Evidence, worth: Worth) -> float:
    """Note the kind of a proposal at the node at hand; returns how likely it is, by its estimate and what its kind has
    been worth, at most `surest`."""
    kind = _kind_of(row, proposals, evidence)
    proposals.kinds[row] = kind
    return float(min(proposals.estimates[row] * worth.factors[kind], surest))
