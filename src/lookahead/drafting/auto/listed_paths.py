"""Paths that were listed before the search: by rejected siblings, a predicted text, and sources of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner, loop_arrays, loop_tuple
from lookahead.drafting.auto.proposals import MOST_LISTED, UNLISTED_LOG, Nodes, Proposals, proposal_of, set_default
from lookahead.drafting.auto.source import TokenPaths

PRIOR = 4.0
"""Tokens of a source that are counted beforehand, as if they had come true as often as it said."""

KEPT = 0.97
"""What the record of a source keeps of its weight with each step in which it listed something."""


class ListedArrays(NamedTuple):
    """Tokens of the paths of all sources, as trees. The first ones, one for each source, stand for the root.

    Attributes:
        tokens: Each token, `[listed]`.
        logs: Logarithm of its probability after its parent, `[listed]`.
        children: The first token that follows it, -1 if none does, `[listed]`.
        siblings: The next token after the same parent, -1 if there is none, `[listed]`.
        reached: Which of them each node of the search is, -1 if none, `[sources, nodes]`.
        columns: The feature of each source, `[sources]`; -1 for one that is weighed by its own record.
        expected: How many selected tokens each source listed by its probabilities, `[sources]`.
        accepted: How many it did list, likewise.
    """

    tokens: NDArray[np.int64]
    logs: NDArray[np.float64]
    children: NDArray[np.int64]
    siblings: NDArray[np.int64]
    reached: NDArray[np.int64]
    columns: NDArray[np.int64]
    expected: NDArray[np.float64]
    accepted: NDArray[np.float64]


class ListedPaths:
    """Room for what sources list.

    Args:
        columns: The feature of each source, -1 for none.
        nodes: Nodes of a search.
    """

    def __init__(self, columns: Sequence[int], nodes: int) -> None:
        size = len(columns) + MOST_LISTED
        tokens, children, siblings = (np.full(size, -1, dtype=np.int64) for _ in range(3))
        reached = np.full((len(columns), nodes), -1, dtype=np.int64)
        record = np.full((2, len(columns)), PRIOR)
        of_sources = reached, np.array(columns, dtype=np.int64), *record
        self.arrays = ListedArrays(tokens, np.zeros(size), children, siblings, *of_sources)

    def fill(self, paths: Sequence[TokenPaths]) -> ListedArrays:
        """What compiled loops read, with the paths of each source instead of what was there."""
        end = begin = len(paths)
        self.arrays.children[:begin] = -1
        for source, each in enumerate(paths):
            told: Any = (each.tokens, each.parents, each.probabilities)
            end += len(told[0])
            if end > begin:
                self._make_room(end)
                tokens, parents, probabilities = loop_arrays(*told)
                _append(source, begin, tokens, parents, probabilities, loop_tuple(self.arrays))
                begin = end
        return self.arrays

    def start(self) -> None:
        """Begin a text: each source is believed as it says."""
        self.arrays.expected[:] = self.arrays.accepted[:] = PRIOR

    def learn(self, selected: Sequence[int]) -> None:
        """Compare what was listed with the tokens that a step selected."""
        (tokens,) = loop_arrays(np.array(selected, dtype=np.int64))
        _compare(tokens, loop_tuple(self.arrays))

    def _make_room(self, size: int) -> None:
        old = self.arrays
        if size > len(old.tokens):
            more = 2 * size - len(old.tokens)
            longer = (np.concatenate([each, np.full(more, -1, dtype=each.dtype)]) for each in old[:4])
            self.arrays = ListedArrays._make((*longer, *old[4:]))


@compiled
def _append(
    source: int,
    begin: int,
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    listed: ListedArrays,
) -> None:
    """Write the paths of a source from place `begin` on."""
    for index in range(len(tokens)):
        listed.tokens[begin + index] = tokens[index]
        listed.logs[begin + index] = log(probabilities[index])
        listed.children[begin + index] = -1
    for back in range(len(tokens)):  # from the end, so that those after one parent keep their order
        index = len(tokens) - 1 - back
        parent = begin + parents[index] if parents[index] >= 0 else source
        listed.siblings[begin + index] = listed.children[parent]
        listed.children[parent] = begin + index


@compiled
def _compare(selected: NDArray[np.int64], listed: ListedArrays) -> None:
    """Follow the selected tokens along the paths of each source, and note how many of them it listed."""
    for source in range(len(listed.columns)):
        expected = accepted = 0.0
        place = source
        for token in selected:
            child = listed.children[place]
            place = -1
            while child >= 0:
                expected += exp(listed.logs[child])
                if listed.tokens[child] == token:
                    accepted += 1.0
                    place = child
                child = listed.siblings[child]
            if place < 0:
                break
        if expected > 0:
            listed.expected[source] = PRIOR + KEPT * (listed.expected[source] - PRIOR) + expected
            listed.accepted[source] = PRIOR + KEPT * (listed.accepted[source] - PRIOR) + accepted


@inner
def propose_listed(node: int, nodes: Nodes, proposals: Proposals, listed: ListedArrays) -> None:
    """Propose the tokens that sources list after the path to a node.

    Args:
        node: The node at the end of the path.
        nodes: The tree.
        proposals: Get what may follow; the logarithm of its probability is the feature.
        listed: The paths.
    """
    for source in range(len(listed.columns)):
        place = source
        if nodes.depths[node] > 0:
            place = listed.reached[source, nodes.parents[node]]
            place = listed.children[place] if place >= 0 else -1
            while place >= 0 and listed.tokens[place] != nodes.tokens[node]:
                place = listed.siblings[place]
        listed.reached[source, node] = place
        child = listed.children[place] if place >= 0 else -1
        column = listed.columns[source]
        if child >= 0 and column >= 0:
            set_default(column, UNLISTED_LOG, proposals)
        proposed = 0
        while child >= 0 and proposed < MOST_LISTED:
            new = proposals.counts[0]
            row = proposal_of(listed.tokens[child], node, proposals)
            if column >= 0:
                proposals.features[row, column] = max(listed.logs[child], UNLISTED_LOG)
            else:
                share = min(listed.accepted[source] / listed.expected[source], 1 / exp(listed.logs[child]))
                proposals.least[row] = max(proposals.least[row], share * exp(listed.logs[child]))
                if row == new:
                    proposals.features[row, 0] = 1.0
            proposed += 1
            child = listed.siblings[child]
