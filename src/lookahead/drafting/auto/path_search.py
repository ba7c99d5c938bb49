"""The likeliest path after each text of a batch: the likeliest token, then the likeliest one after that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.listed_paths import ListedArrays, propose_listed
from lookahead.drafting.auto.ngram_entries import Entries, propose_known
from lookahead.drafting.auto.path_arrays import PathArrays, listed_of, nodes_of, proposals_of
from lookahead.drafting.auto.proposals import Nodes, Proposals, begin_node
from lookahead.drafting.auto.search import LEAST_CHAINED, read_path
from lookahead.drafting.auto.texts import LONGEST, Followed, MatchArrays, TextArrays, propose_matches
from lookahead.drafting.auto.weights import Columns, estimate


class Wanted(NamedTuple):
    """Which drafts are wanted.

    Attributes:
        longest: Most tokens of a draft.
        most_tokens: Most tokens of a text.
        least: How likely each drafted token has to be to be accepted with all before it.
        worth: How likely one has to be to bring what it costs.
        surest: Highest probability of a token after another.
    """

    longest: int
    most_tokens: int
    least: float
    worth: float
    surest: float


class Evidences(NamedTuple):
    """Where proposals come from, and what weighs them.

    Attributes:
        entries: The n-gram memory.
        followed: Room for the occurrences that each node follows.
        context: Room for the last tokens of a path, `[LONGEST]`.
        columns: Where their features are.
        weights: See `Weights`.
    """

    entries: Entries
    followed: Followed
    context: NDArray[np.int64]
    columns: Columns
    weights: NDArray[np.float64]


@compiled
def find_paths(
    rows: NDArray[np.int64],
    wanted: Wanted,
    texts: TextArrays,
    paths: PathArrays,
    known: Evidences,
    drafts: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> float:
    """Draft after the texts in some places; returns how much drafted tokens lack of what they cost, in all.

    Args:
        rows: The place of each row, `[rows]`; -1 where no draft is wanted.
        wanted, texts, paths, known: See there.
        drafts: Gets the drafts, `[at least rows, longest]`.
        counts: Gets their lengths, `[at least rows]`.
    """
    lost = 0.0
    for row in range(len(rows)):
        counts[row] = 0
        place = rows[row]
        if place < 0:
            continue
        room = min(wanted.longest, wanted.most_tokens - texts.dropped[place] - texts.lengths[place] - 1)
        count = _find_path(place, max(room, 0), wanted, texts, paths, known)
        root, promised = paths.states.roots[place], 0.0
        for index in range(count):
            drafts[row, index] = paths.nodes.tokens[place, root + 1 + index]
            probability = paths.nodes.probabilities[place, root + 1 + index]
            promised += probability
            lost += max(wanted.worth - probability, 0.0)
        counts[row] = count
        paths.states.drafted[place], paths.states.promised[place] = count, promised
        paths.listed.children[place, 0] = -1  # what was said after a token that was rejected is of use once
    return lost


@inner
def _find_path(place: int, most: int, wanted: Wanted, texts: TextArrays, paths: PathArrays, known: Evidences) -> int:
    """Draft after one text; returns how many tokens."""
    nodes, proposals, listed = nodes_of(place, paths), proposals_of(place, paths), listed_of(place, paths)
    length = texts.lengths[place]
    matches = MatchArrays(
        texts.tokens[place],
        texts.newest[place],
        texts.earlier[place],
        known.followed.places,
        known.followed.lengths,
        known.followed.found,
        length,
    )
    size = min(length, LONGEST)
    for index in range(size):
        nodes.tokens[index] = texts.tokens[place, length - size + index]
    for index in range(len(proposals.table_nodes)):
        proposals.table_nodes[index] = -1
    proposals.counts[0] = 0
    node = paths.states.roots[place] = size - 1
    nodes.depths[node] = 0
    nodes.probabilities[node] = 1.0
    for count in range(most + 1):
        begin = begin_node(proposals)
        nodes.starts[node] = begin
        nodes.known[node] = _propose(node, nodes, proposals, matches, listed, known) if count < most else 0
        nodes.starts[node + 1] = proposals.counts[0]
        likeliest, probability = _choose(node, begin, nodes, proposals, wanted, known)
        least = wanted.least if count == 0 else max(wanted.least, LEAST_CHAINED)
        if likeliest < 0 or probability < least:
            return count
        node += 1
        nodes.tokens[node] = proposals.tokens[likeliest]
        nodes.depths[node] = count + 1
        nodes.probabilities[node] = probability
    return most


@inner
def _propose(
    node: int, nodes: Nodes, proposals: Proposals, matches: MatchArrays, listed: ListedArrays, known: Evidences
) -> int:
    """Let each source propose what may follow a node; returns the longest context that the memory knows."""
    size = read_path(node, nodes, known.context)
    longest = propose_known(node, known.context, size, proposals, known.entries, known.columns.memory)
    propose_matches(node, known.context, size, nodes, proposals, matches, known.columns.matches)
    propose_listed(node, nodes, proposals, listed)
    return longest


@inner
def _choose(
    node: int, begin: int, nodes: Nodes, proposals: Proposals, wanted: Wanted, known: Evidences
) -> tuple[int, float]:
    """The likeliest proposal after a node, the first one of equals, and how likely the path to it is; -1 if none is."""
    end = proposals.counts[0]
    estimate(begin, end, nodes.known[node], known.weights, proposals)
    likeliest, most = -1, 0.0
    for row in range(begin, end):
        probability = nodes.probabilities[node] * min(proposals.estimates[row], wanted.surest)
        if likeliest < 0 or probability > most:
            likeliest, most = row, probability
    return likeliest, most
