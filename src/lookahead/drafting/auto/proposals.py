"""What may follow the nodes of a tree while it is searched, and what each source says for it: its features."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner

MOST_LISTED = 16
"""Most tokens that a source proposes after a node, if it is not the memory."""

UNLISTED_LOG = -7.0
"""Log-probability of a token that such a source does not propose where it proposes others."""


class Nodes(NamedTuple):
    """The nodes of a tree during the search, the most probable first; before them, the last tokens of the text.

    Attributes:
        tokens: Token of each node.
        parents: Node that each follows; -1 for the first.
        depths: Levels below the root, which is the last token of the text.
        probabilities: Estimated probability that the path to the node is accepted.
        known: Length of the longest context of the node that the n-gram memory knows.
        starts: Its first proposal; they reach to that of the next node.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    known: NDArray[np.int64]
    starts: NDArray[np.int64]


class Proposals(NamedTuple):
    """Tokens that may follow nodes, those of one node together.

    Attributes:
        tokens: Token of each proposal.
        nodes: Node that it may follow.
        estimates: Estimated probability that it does.
        orders: Length of the longest context after which the memory names it; 0 if it does not.
        least: How likely it is at least, as the record of a source that lists it has it.
        features: What the sources say for it, `[proposals, columns]`; in column 0 is 1 where no weighed source does.
        defaults: Features, at the node at hand, of a token that no source has proposed there, `[columns]`.
        counts: How many proposals there are, and how many there were before the node at hand, `[2]`.
        table: Hash table of the proposals of the node at hand; its size is a power of two.
        table_nodes: Node to which each place of it belongs.
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


def allocate_nodes(count: int) -> Nodes:
    """Room for so many nodes."""
    tokens, depths, known, starts = (np.zeros(count + 1, dtype=np.int64) for _ in range(4))
    return Nodes(tokens, np.arange(-1, count), depths, np.zeros(count + 1), known, starts)


def allocate_proposals(count: int, at_a_node: int, columns: int) -> Proposals:
    """Room for so many proposals in all, so many at one node, with features in so many columns."""
    tokens, nodes, orders = (np.zeros(count, dtype=np.int64) for _ in range(3))
    estimates, least = np.zeros((2, count))
    table, table_nodes = (np.zeros(1 << (2 * at_a_node).bit_length(), dtype=np.int64) for _ in range(2))
    features, defaults = np.zeros((count, columns)), np.zeros(columns)
    counts = np.zeros(2, dtype=np.int64)
    return Proposals(tokens, nodes, estimates, orders, least, features, defaults, counts, table, table_nodes)


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
def begin_node(proposals: Proposals) -> int:
    """Make way for the proposals of the next node; returns the number of the first one."""
    proposals.counts[1] = proposals.counts[0]
    for column in range(len(proposals.defaults)):
        proposals.defaults[column] = 0.0
    return int(proposals.counts[0])
