"""Rejected-sibling continuations: what the model predicted after tokens that were tried in the root's place.

It often says the same after the right one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner, loop_arrays, loop_tuple
from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.proposals import MOST_LISTED, Nodes
from lookahead.drafting.auto.source import NO_PATHS, TokenPaths

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
