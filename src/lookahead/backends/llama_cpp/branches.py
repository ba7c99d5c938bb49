"""A token tree as sequences that share their beginnings: one for each leaf."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.core.token_tree import TokenTree


@dataclass(frozen=True)
class Branches:
    """The nodes of a tree, depth first, and the leaves below each.

    Depth first, the leaves below a node are neighbours. A node's place in the order is its *slot*.

    Attributes:
        order: Node in each slot, `[nodes]`.
        slots: Slot of each node, `[nodes]`, the inverse of `order`.
        first: The first leaf below the node in each slot, `[nodes]`; a leaf is below itself.
        last: The last one, `[nodes]`.
        leaves: How many there are.
    """

    order: NDArray[np.int64]
    slots: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    leaves: int


def branches(tree: TokenTree) -> Branches:
    """The leaves of `tree`; those of the paths that were added first, the likeliest ones, come first."""
    nodes = len(tree)
    if tree.is_chain:
        places = np.arange(nodes)
        return Branches(places, places, np.zeros_like(places), np.zeros_like(places), 1)
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        children[tree.parents[node]].append(node)
    ordered: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack += reversed(children[node])
    order = np.array(ordered)
    slots = np.empty_like(order)
    slots[order] = np.arange(nodes)
    is_leaf = np.array([not children[node] for node in ordered])
    counts = is_leaf.astype(np.int64)
    first = counts.cumsum() - counts
    below = counts.tolist()
    for node in reversed(ordered[1:]):  # a node comes after its parent
        below[slots[tree.parents[node]]] += below[slots[node]]
    return Branches(order, slots, first, first + np.array(below) - 1, int(counts.sum()))
