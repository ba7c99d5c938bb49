"""Tokens that may follow the text, listed before the search: by sources, rejected siblings, and recent predictions.

Sources list paths before the search: a predicted text, those of a user's own, and rejected siblings. The last are what
the model predicted after tokens that were tried in the root's place; it often says the same after the right one.
Recent predictions are tokens that the model thought of lately: tried after the root with nodes that nothing better
takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner, loop_arrays, loop_tuple
from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.ngram_entries import Entries, entry_after
from lookahead.drafting.auto.proposals import MOST_LISTED, UNLISTED_LOG, Nodes, Proposals, proposal_of, set_default
from lookahead.drafting.auto.source import NO_PATHS, TokenPaths

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
                likely = exp(listed.logs[child]) * listed.accepted[source] / listed.expected[source]
                proposals.least[row] = max(proposals.least[row], min(likely, 1.0))
                if row == new:
                    proposals.features[row, 0] = 1.0
            proposed += 1
            child = listed.siblings[child]


_MOST_SIBLINGS = 16
"""Siblings of which all that follows them finds room."""

_AFTER_ROOT = np.full(MOST_LISTED, -1, dtype=np.int64)


class RejectedSiblings:
    """A source (`Source`) of single tokens after the root. Each sibling counts as much as it was thought likely.

    Args:
        nodes: The tree that the search grows.
        top_k: Likeliest tokens that are known for each.
    """

    name = "rejected siblings"

    def __init__(self, nodes: Nodes, top_k: int) -> None:
        self._nodes = nodes
        self._paths = NO_PATHS
        self._followers = np.zeros(_MOST_SIBLINGS * top_k, dtype=np.int64)
        self._shares = np.zeros(_MOST_SIBLINGS * top_k)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence: nothing was tried yet."""
        self.forget()

    def propose(self) -> TokenPaths:
        """See `Source`."""
        return self._paths

    def observe(self, result: StepResult) -> None:
        """A step of which nothing is known about siblings."""
        self.forget()

    def forget(self) -> None:
        """Nothing is known about siblings."""
        self._paths = NO_PATHS

    def follow(self, before: int, first: int, top_ids: NDArray[np.int64], shares: NDArray[np.float32]) -> None:
        """Take what the model says after the nodes that follow one.

        Args:
            before: The node that they follow.
            first: The first node below the root.
            top_ids: The likeliest tokens after the root and each node that was sent, `[1 + sent, top_k]`.
            shares: Their probabilities, likewise.
        """
        told = loop_arrays(top_ids, shares, self._followers, self._shares)
        count = min(_collect(before, first, loop_tuple(self._nodes), *told), MOST_LISTED)
        self._paths = TokenPaths(self._followers[:count], _AFTER_ROOT[:count], self._shares[:count])


@compiled
def _collect(
    before: int,
    first: int,
    nodes: Nodes,
    top_ids: NDArray[np.int64],
    top_probabilities: NDArray[np.float32],
    followers: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> int:
    """Write what the model says after the nodes whose parent is `before`; returns how many tokens these are."""
    count = 0
    for row in range(1, top_ids.shape[0]):
        node = first + row - 1
        if nodes.parents[node] == before:
            for rank in range(top_ids.shape[1]):
                if top_ids[row, rank] < 0:
                    break
                share = nodes.probabilities[node] * float(top_probabilities[row, rank])
                count = add_share(top_ids[row, rank], share, count, followers, shares)
    total = 0.0
    for index in range(count):
        total += shares[index]
    rank_shares(count, total, followers, shares)
    return count


@inner
def add_share(token: int, share: float, count: int, followers: NDArray[np.int64], shares: NDArray[np.float64]) -> int:
    """Add to the share of a token among the first `count` followers; one that does not fit is left out.

    Returns:
        How many followers there are now.
    """
    place = 0
    while place < count and followers[place] != token:
        place += 1
    if place == len(followers):
        return count
    if place == count:
        followers[place] = token
        shares[place] = 0.0
        count += 1
    shares[place] += share
    return count


@inner
def rank_shares(count: int, total: float, followers: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    """Put the first `count` followers in the order of their shares of `total`, the largest first."""
    for index in range(count):
        token = followers[index]
        share = shares[index] / total
        at = index
        while at > 0 and share > shares[at - 1]:
            followers[at] = followers[at - 1]
            shares[at] = shares[at - 1]
            at -= 1
        followers[at] = token
        shares[at] = share


_READ = 512
_LATEST = 128
MOST_TRIED = 64
"""Most predictions that are tried after the root when nothing better is left."""

_KNOWN_SHARE = 0.25
"""What a prediction counts if the memory knows already what comes after it: what it teaches is worth less."""


class RecentArrays(NamedTuple):
    """Tokens, the latest first, and the probability that each of the first of them is given to follow the root."""

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float64]


NOTHING_RECENT = RecentArrays(np.zeros(0, dtype=np.int64), np.zeros(0))


class RecentPredictions:
    """The tokens of the end of the prompt, and what the model predicted since, each once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # the latest first
        self._probabilities = 0.001 / np.arange(4, 4 + MOST_TRIED, dtype=np.float64)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a text."""
        self._tokens = []
        self.note(list(prompt[-_READ:])[::-1])

    def note(self, tokens: Sequence[int]) -> None:
        """Put the tokens, the latest first, before all others."""
        self._tokens = list(dict.fromkeys([*tokens, *self._tokens]))[:_LATEST]

    def arrays(self) -> RecentArrays:
        """What compiled loops read."""
        return RecentArrays(np.array(self._tokens, dtype=np.int64), self._probabilities)


@inner
def probability_of(index: int, recent: RecentArrays, entries: Entries) -> float:
    """How likely a recent prediction is taken to be; less if the memory knows what comes after it."""
    known = entry_after(recent.tokens[index], entries) >= 0
    return float(recent.probabilities[index] * (_KNOWN_SHARE if known else 1.0))
