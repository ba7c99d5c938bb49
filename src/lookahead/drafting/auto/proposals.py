"""The nodes that a search finds after each text, and the proposals that it finds them among.

Rows of several numbers are numpy records: compiled loops take each array of them as one argument, whatever it holds.
"""

from __future__ import annotations

from math import frexp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner

MOST_LISTED = 16
"""Most tokens that a source proposes after a node, if it is not the memory."""

_POWERS = 64
"""Powers of two of probabilities that are distinguished."""

NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),  # the node that it follows
        ("depth", np.int64),  # levels below the root
        ("order", np.int64),  # length of the longest context after which the memory names it; 0 if it does not
        ("match", np.int64),  # class of the longest context match that it follows, -1 if it follows none
        ("weighed", np.int64),  # 1 where its probability came of weighed evidence, which it is a test of
        ("sibling", np.int64),  # 1 where the model said it after a token that was rejected in its place
        ("known", np.int64),  # length of the longest context that ends with it and that the memory knows
        ("matches", np.int64),  # how many earlier occurrences the path to it follows
        ("probability", np.float64),  # estimated probability that the path to it is accepted
    ]
)
"""A node of the tree found after a text, the most probable one first; node 0 is the last token of the text, the root.
The trees of all texts are `[places, nodes]`."""

PROPOSAL = np.dtype(
    [
        ("token", np.int64),
        ("node", np.int64),  # which it may follow
        ("order", np.int64),  # as of a node
        ("match", np.int64),  # as of a node
        (
            "listed",
            np.int64,
        ),  # 1 where no source names it but those that list paths; then, where it is as likely as these
        ("estimate", np.float64),  # estimated probability that it follows; then that of the whole path
        ("least", np.float64),  # how likely it is at least, as the record of a source that lists it has it
    ]
)
"""A token that may follow a node of the tree that is searched; those of one node stand together."""

SEARCH = np.dtype(
    [
        ("count", np.int64),  # proposals
        ("begin", np.int64),  # the first one of the node at hand
        ("waiting", np.int64),  # proposals that wait for their turn
        ("counted", np.int64),  # how many of those that were let in `powers` counts
        ("power", np.int64),  # the least likely power of two that is of use
        ("powers", np.int64, (_POWERS,)),  # how many were let in by the power of two of their probabilities
    ]
)
"""How far a search is."""


class Proposals(NamedTuple):
    """The proposals of a search.

    Attributes:
        rows: `PROPOSAL`s.
        logs: What the memory says for each after contexts of 1, 2, ... tokens, and in the last column what rejected
            siblings say: log-probabilities, 0 where nothing is said, `[proposals, orders + 1]`.
        defaults: The same of a token that no source has proposed, at the node at hand, `[orders + 1]`.
        table: Hash table of the proposals of the node at hand: the number of a proposal and the node it belongs to,
            `[a power of two, 2]`.
        heap: Numbers of the proposals that wait, the most probable path first, as a binary heap.
        search: A `SEARCH`.
    """

    rows: NDArray[Any]
    logs: NDArray[np.float64]
    defaults: NDArray[np.float64]
    table: NDArray[np.int64]
    heap: NDArray[np.int64]
    search: Any


def allocate_proposals(count: int, at_a_node: int, orders: int) -> Proposals:
    """Room for so many proposals in all, so many at one node, and contexts of up to so many tokens."""
    table = np.zeros((1 << (2 * at_a_node).bit_length(), 2), dtype=np.int64)
    heap, search = np.zeros(count, dtype=np.int64), np.zeros(1, dtype=SEARCH)[0]
    logs, defaults = np.zeros((count, orders + 1)), np.zeros(orders + 1)
    return Proposals(np.zeros(count, dtype=PROPOSAL), logs, defaults, table, heap, search)


@inner
def _place_of(token: int, node: int, rows: NDArray[Any], table: NDArray[np.int64]) -> int:
    """Place in the table where this token after this node is, or would be."""
    last = len(table) - 1
    place = token & last
    while table[place, 1] == node and rows[table[place, 0]]["token"] != token:
        place = (place + 1) & last
    return place


@inner
def is_proposed(token: int, node: int, proposals: Proposals) -> bool:
    """Whether the token is proposed after this node, which is the one at hand."""
    table = proposals.table
    return bool(table[_place_of(token, node, proposals.rows, table), 1] == node)


@inner
def proposal_of(token: int, node: int, proposals: Proposals) -> int:
    """Number of the proposal of `token` after `node`, the one at hand; of a new one the sources say the defaults."""
    rows, logs, defaults, table, _, search = proposals
    place = _place_of(token, node, rows, table)
    if table[place, 1] != node:
        row = search["count"]
        search["count"] = row + 1
        table[place, 0], table[place, 1] = row, node
        proposal = rows[row]
        proposal["token"], proposal["node"] = token, node
        proposal["order"], proposal["match"], proposal["listed"], proposal["least"] = 0, -1, 0, 0.0
        for column in range(len(defaults)):
            logs[row, column] = defaults[column]
    return int(table[place, 0])


@inner
def set_default(column: int, value: float, proposals: Proposals) -> None:
    """What a source that speaks at the node at hand says for a token that it does not name."""
    search, logs = proposals.search, proposals.logs
    proposals.defaults[column] = value
    for row in range(search["begin"], search["count"]):
        logs[row, column] = value


@inner
def begin_tree(proposals: Proposals) -> None:
    """Nothing is proposed yet."""
    table, search = proposals.table, proposals.search
    search["count"] = 0
    for place in range(len(table)):
        table[place, 1] = -1
    let_none_wait(search)


@inner
def begin_node(proposals: Proposals) -> int:
    """Make way for the proposals of the next node; returns the number of the first one."""
    search, defaults = proposals.search, proposals.defaults
    search["begin"] = search["count"]
    for column in range(len(defaults)):
        defaults[column] = 0.0
    return int(search["count"])


@inner
def let_none_wait(search: Any) -> None:
    """Empty the heap."""
    powers = search["powers"]
    for power in range(_POWERS):
        powers[power] = 0
    search["waiting"] = search["counted"] = 0
    search["power"] = _POWERS - 1


@inner
def power_of(probability: float) -> int:
    """The power of two that a probability is counted by: 0 for one of at least 1 / 2, 1 from 1 / 4 on, and so on."""
    return int(min(-frexp(probability)[1], _POWERS - 1))


@inner
def is_useful(probability: float, most: int, search: Any) -> bool:
    """Whether a path may be among the `most` likeliest so far; they are counted by their powers of two."""
    power = power_of(probability)
    if power > search["power"]:
        return False
    powers = search["powers"]
    powers[power] += 1
    search["counted"] += 1
    while search["power"] > 0 and search["counted"] - powers[search["power"]] >= most:
        search["counted"] -= powers[search["power"]]
        search["power"] -= 1
    return True


@inner
def _comes_before(one: int, other: int, rows: NDArray[Any]) -> bool:
    first, second = rows[one]["estimate"], rows[other]["estimate"]
    return bool(first > second or (first == second and one < other))


@inner
def push(row: int, proposals: Proposals) -> None:
    """Let a proposal wait for its turn."""
    rows, heap, search = proposals.rows, proposals.heap, proposals.search
    at = search["waiting"]
    search["waiting"] = at + 1
    while at > 0 and _comes_before(row, heap[(at - 1) >> 1], rows):
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = row


@inner
def pop(proposals: Proposals) -> int:
    """The proposal with the most probable path, which waits no longer; of equal ones the first."""
    rows, heap, search = proposals.rows, proposals.heap, proposals.search
    best, count = heap[0], search["waiting"] - 1
    search["waiting"] = count
    row, at = heap[count], 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _comes_before(heap[child + 1], heap[child], rows):
            child += 1
        if not _comes_before(heap[child], row, rows):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = row
    return int(best)
