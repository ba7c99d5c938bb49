"""The nodes that a search finds after each text, and the proposals that it finds them among."""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner

MOST_LISTED = 16
"""Most tokens that a source proposes after a node, if it is not the memory."""

_POWERS = 64
"""Powers of two of probabilities that are distinguished."""


class Nodes(NamedTuple):
    """The tree found after a text, the most probable node first; node 0 is the last token of the text, the root. For
    all texts together each array has one more dimension in front, that of the places.

    Attributes:
        tokens: Token of each node, `[nodes]`.
        parents: Node that each follows.
        depths: Levels below the root.
        probabilities: Estimated probability that the path to the node is accepted.
        orders: Length of the longest context after which the memory names it; 0 if it does not.
        features: What the sources said for it, `[nodes, columns]`.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    orders: NDArray[np.int64]
    features: NDArray[np.float64]


class Proposals(NamedTuple):
    """Tokens that may follow the nodes of the tree that is searched, those of one node together; and those of them that
    wait for their turn, the most probable path first, in a binary heap.

    Attributes:
        tokens: Token of each proposal.
        nodes: Node that it may follow.
        estimates: Estimated probability that it does; then that of the whole path.
        orders: See `Nodes`.
        least: How likely it is at least, as the record of a source that lists it has it.
        features: What the sources say for it, `[proposals, columns]`; in column 0 is 1 where no weighed source does.
        defaults: Features, at the node at hand, of a token that no source has proposed there, `[columns]`.
        counts: How many proposals there are, and how many there were before the node at hand, `[2]`.
        table: Hash table of the proposals of the node at hand; its size is a power of two.
        table_nodes: Node to which each place of it belongs.
        known: Length of the longest context of each node that the memory knows, `[nodes]`.
        heap: Numbers of the proposals that wait.
        powers: How many were let in by the power of two of their probabilities.
        waiting: How many wait, how many `powers` counts, and the least likely power of use, `[3]`.
    """

    tokens: NDArray[np.int64]
    nodes: NDArray[np.int64]
    estimates: NDArray[np.float64]
    orders: NDArray[np.int64]
    least: NDArray[np.float64]
    features: NDArray[np.float64]
    defaults: NDArray[np.float64]
    counts: NDArray[np.int64]
    table: NDArray[np.int64]
    table_nodes: NDArray[np.int64]
    known: NDArray[np.int64]
    heap: NDArray[np.int64]
    powers: NDArray[np.int64]
    waiting: NDArray[np.int64]


def allocate_nodes(places: int, count: int, columns: int) -> Nodes:
    """Room for so many nodes in each place."""
    tokens, parents, depths, orders = np.zeros((4, places, count), dtype=np.int64)
    return Nodes(tokens, parents, depths, np.zeros((places, count)), orders, np.zeros((places, count, columns)))


def allocate_proposals(count: int, at_a_node: int, nodes: int, columns: int) -> Proposals:
    """Room for so many proposals in all, so many at one node, with features in so many columns."""
    tokens, of_nodes, orders, heap = (np.zeros(count, dtype=np.int64) for _ in range(4))
    table, table_nodes = (np.zeros(1 << (2 * at_a_node).bit_length(), dtype=np.int64) for _ in range(2))
    counts, known, powers, waiting = (np.zeros(size, dtype=np.int64) for size in (2, nodes, _POWERS, 3))
    estimates, least, features, defaults = (
        np.zeros(count),
        np.zeros(count),
        np.zeros((count, columns)),
        np.zeros(columns),
    )
    of_node = features, defaults, counts, table, table_nodes, known
    return Proposals(tokens, of_nodes, estimates, orders, least, *of_node, heap, powers, waiting)


@inner
def nodes_of(place: int, every: Nodes) -> Nodes:
    """Those of one text."""
    return Nodes(
        every.tokens[place],
        every.parents[place],
        every.depths[place],
        every.probabilities[place],
        every.orders[place],
        every.features[place],
    )


@inner
def _place_of(token: int, node: int, proposals: Proposals) -> int:
    """Place in the table where this token after this node is, or would be."""
    last = len(proposals.table) - 1
    place = token & last
    while proposals.table_nodes[place] == node and proposals.tokens[proposals.table[place]] != token:
        place = (place + 1) & last
    return place


@inner
def is_proposed(token: int, node: int, proposals: Proposals) -> bool:
    """Whether the token is proposed after this node, which is the one at hand."""
    return bool(proposals.table_nodes[_place_of(token, node, proposals)] == node)


@inner
def proposal_of(token: int, node: int, proposals: Proposals) -> int:
    """Number of the proposal of `token` after `node`, the one at hand; a new one has the default features."""
    place = _place_of(token, node, proposals)
    if proposals.table_nodes[place] != node:
        row = proposals.counts[0]
        proposals.counts[0] = row + 1
        proposals.table_nodes[place] = node
        proposals.table[place] = row
        proposals.tokens[row] = token
        proposals.nodes[row] = node
        proposals.orders[row] = 0
        proposals.least[row] = 0.0
        for column in range(len(proposals.defaults)):
            proposals.features[row, column] = proposals.defaults[column]
    return int(proposals.table[place])


@inner
def set_default(column: int, value: float, proposals: Proposals) -> None:
    """What a source that speaks at the node at hand says for a token that it does not name."""
    proposals.defaults[column] = value
    for row in range(proposals.counts[1], proposals.counts[0]):
        proposals.features[row, column] = value


@inner
def begin_tree(proposals: Proposals) -> None:
    """Nothing is proposed yet."""
    proposals.counts[0] = 0
    for place in range(len(proposals.table_nodes)):
        proposals.table_nodes[place] = -1
    let_none_wait(proposals)


@inner
def begin_node(proposals: Proposals) -> int:
    """Make way for the proposals of the next node; returns the number of the first one."""
    proposals.counts[1] = proposals.counts[0]
    for column in range(len(proposals.defaults)):
        proposals.defaults[column] = 0.0
    return int(proposals.counts[0])


@inner
def let_none_wait(proposals: Proposals) -> None:
    """Empty the heap."""
    for power in range(len(proposals.powers)):
        proposals.powers[power] = 0
    proposals.waiting[0] = proposals.waiting[1] = 0
    proposals.waiting[2] = len(proposals.powers) - 1


@inner
def is_useful(probability: float, most: int, proposals: Proposals) -> bool:
    """Whether a path may be among the `most` likeliest so far; they are counted by their powers of two."""
    powers, waiting = proposals.powers, proposals.waiting
    power = min(-frexp(probability)[1], len(powers) - 1)
    if power > waiting[2]:
        return False
    powers[power] += 1
    waiting[1] += 1
    while waiting[2] > 0 and waiting[1] - powers[waiting[2]] >= most:
        waiting[1] -= powers[waiting[2]]
        waiting[2] -= 1
    return True


@inner
def _comes_before(one: int, other: int, proposals: Proposals) -> bool:
    first, second = proposals.estimates[one], proposals.estimates[other]
    return bool(first > second or (first == second and one < other))


@inner
def push(row: int, proposals: Proposals) -> None:
    """Let a proposal wait for its turn."""
    heap, at = proposals.heap, proposals.waiting[0]
    proposals.waiting[0] = at + 1
    while at > 0 and _comes_before(row, heap[(at - 1) >> 1], proposals):
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = row


@inner
def pop(proposals: Proposals) -> int:
    """The proposal with the most probable path, which waits no longer; of equal ones the first."""
    heap = proposals.heap
    best, count = int(heap[0]), proposals.waiting[0] - 1
    proposals.waiting[0] = count
    row, at = int(heap[count]), 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _comes_before(heap[child + 1], heap[child], proposals):
            child += 1
        if not _comes_before(heap[child], row, proposals):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = row
    return best
