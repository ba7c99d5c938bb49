"""What the model's answer to a path teaches, in one compiled call: with many texts, calls take longer than lessons."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner, loop_arrays, loop_tuple
from lookahead.drafting.auto.listed_paths import ListedArrays
from lookahead.drafting.auto.ngram_entries import LEAST_PROBABILITY
from lookahead.drafting.auto.proposals import MOST_LISTED, Nodes, Proposals
from lookahead.drafting.auto.scorer import Acceptance, Lessons, ascend
from lookahead.drafting.auto.search import judge
from lookahead.drafting.auto.worth import Worth


class _Room(NamedTuple):
    """Room for what is worked out of one path: of each proposal, kind of evidence, node, and weight."""

    outcomes: NDArray[np.float64]
    expected: NDArray[np.float64]
    came: NDArray[np.float64]
    starts: NDArray[np.int64]
    known: NDArray[np.int64]
    counts: NDArray[np.float64]
    chosen: NDArray[np.int64]
    gradient: NDArray[np.float64]
    own: NDArray[np.float64]


class PathLessons:
    """Teaches what the proposals along a path were worth, as `TreeSearch.teach` does.

    The texts of a batch share it: the room stays in the processor's cache.

    Args:
        acceptance: What learns which proposals are accepted.
        worth: What learns what each kind of evidence is worth.
        nodes: Most nodes of a path, its root included.
        proposals: Most proposals along it.
    """

    def __init__(self, acceptance: Acceptance, worth: Worth, nodes: int, proposals: int) -> None:
        self._acceptance = acceptance
        self._worth = worth
        kinds, weights = len(worth.factors), acceptance.weights
        of_kinds = np.zeros(kinds), np.zeros(kinds)
        starts, known, chosen = (np.zeros(nodes, dtype=np.int64) for _ in range(3))
        of_weights = np.zeros_like(weights), np.zeros(weights.shape[1])
        self._room = _Room(np.zeros(proposals), *of_kinds, starts, known, np.zeros(nodes), chosen, *of_weights)
        self._run = TypedLoop(_learn_path)

    def teach(
        self,
        root: int,
        selected: NDArray[np.int64],
        top_ids: NDArray[np.int64],
        top_probabilities: NDArray[np.float32],
        beside: float,
        nodes: Nodes,
        proposals: Proposals,
        listed: ListedArrays,
    ) -> None:
        """Learn from a path, and list what the model says after its first token that was rejected.

        Args:
            root: The last node that is text.
            selected: The accepted part of the path, and one token more, `[selected]`.
            top_ids: The likeliest tokens after the root and the first nodes of the path, `[at least selected, listed]`.
            top_probabilities: Their probabilities, likewise.
            beside: How much a node counts that does not follow the text.
            nodes, proposals: Those of the search that found the path.
            listed: Gets what is said after the rejected token, if it is there, as what may follow the text.
        """
        acceptance = self._acceptance
        said = np.ascontiguousarray(top_ids), np.ascontiguousarray(top_probabilities)
        arrays = loop_arrays(selected, *said, acceptance.weights, acceptance.squares)
        tuples = map(loop_tuple, (nodes, proposals, self._worth, listed, self._room))
        self._run(root, float(beside), float(acceptance.rate), *arrays, *tuples)


@inner
def _list_followers(
    row: int, top_ids: NDArray[np.int64], top_probabilities: NDArray[np.float32], listed: ListedArrays
) -> None:
    """List the tokens that are predicted in one row, so that their probabilities sum to one."""
    count = 0
    total = 0.0
    while count < min(top_ids.shape[1], MOST_LISTED) and top_ids[row, count] >= 0:
        total += max(float(top_probabilities[row, count]), LEAST_PROBABILITY)
        count += 1
    for rank in range(count):
        listed.tokens[1 + rank] = top_ids[row, rank]
        listed.logs[1 + rank] = log(max(float(top_probabilities[row, rank]), LEAST_PROBABILITY) / total)
        listed.children[1 + rank] = -1
        listed.siblings[1 + rank] = 2 + rank if rank + 1 < count else -1
    listed.children[0] = 1 if count > 0 else -1


@compiled
def _learn_path(
    root: int,
    beside: float,
    rate: float,
    selected: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_probabilities: NDArray[np.float32],
    weights: NDArray[np.float64],
    squares: NDArray[np.float64],
    nodes: Nodes,
    proposals: Proposals,
    worth: Worth,
    listed: ListedArrays,
    room: _Room,
) -> None:
    """`PathLessons.teach`."""
    rows = top_ids.shape[0]
    begin = nodes.starts[root]
    count = nodes.starts[root + rows] - begin
    asked = 0
    for kind in range(len(room.expected)):
        room.expected[kind] = room.came[kind] = 0.0
    for node in range(rows):
        room.chosen[node] = selected[node] if node < len(selected) else -1
        if nodes.starts[root + node + 1] > nodes.starts[root + node]:
            room.starts[asked] = nodes.starts[root + node] - begin
            room.known[asked] = nodes.known[root + node]
            room.counts[asked] = 1.0 if node < len(selected) else beside
            asked += 1
    outcomes = room.outcomes[:count]
    judge(
        root,
        begin,
        False,
        top_ids,
        top_probabilities,
        room.chosen,
        outcomes,
        room.expected,
        room.came,
        proposals,
        worth,
    )
    if asked > 0 and rate > 0:
        features, estimates = proposals.features[begin : begin + count], proposals.estimates[begin : begin + count]
        of_nodes = room.starts[:asked], room.known[:asked], room.counts[:asked]
        lessons = Lessons(features, estimates, outcomes, of_nodes[0], of_nodes[1], of_nodes[2])
        ascend(rate, weights, squares, lessons, room.gradient, room.own)
    if len(selected) < rows:
        _list_followers(len(selected), top_ids, top_probabilities, listed)
