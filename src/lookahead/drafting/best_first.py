"""Trees through what follows single tokens, the likeliest path first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from lookahead.core.token_tree import TokenTree

Followers = Callable[[int], Iterable[tuple[int, float]]]
"""What follows a token: other tokens, each with its probability."""


def grow(tree: TokenTree, nodes: int, followers: Followers) -> None:
    """Add the likeliest paths below the root, the likeliest node first, as far as there is room.

    Args:
        tree: Where they go.
        nodes: How many nodes to add at most.
        followers: Asked for each node that is added, and for the root.
    """
    queue: list[tuple[float, int, int, int]] = []  # minus the probability, tie-breaker, parent, token
    pushed = 0
    node, probability = tree.root, 1.0
    for _ in range(nodes):
        if tree.depths[node] - tree.depths[tree.root] < tree.room:
            for token, share in followers(tree.tokens[node]):
                heappush(queue, (-probability * share, pushed, node, token))
                pushed += 1
        if not queue:
            return
        negative, _, parent, token = heappop(queue)
        (node,) = tree.add_candidates([token], parent)
        probability = -negative


def first_path(nodes: Iterable[int], parents: Iterable[int], root: int) -> list[int]:
    """The first of some nodes that follows `root`, the first that follows that one, and so on: the likeliest path,
    where the likeliest node comes first."""
    path = []
    for node, parent in zip(nodes, parents, strict=True):
        if parent == root:
            path.append(node)
            root = node
    return path
