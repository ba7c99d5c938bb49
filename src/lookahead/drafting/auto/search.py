"""The search of `preset="auto"`: all sources propose, and the most probable continuation is added next."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.learning import UNTRUSTED, Heard
from lookahead.drafting.auto.ngrams import Entries, entry_after, propose_known
from lookahead.drafting.auto.proposals import (
    Nodes,
    Proposals,
    begin_node,
    begin_tree,
    is_proposed,
    is_useful,
    let_none_wait,
    nodes_of,
    pop,
    proposal_of,
    push,
    set_default,
)
from lookahead.drafting.auto.sources import ListedArrays, propose_listed
from lookahead.drafting.auto.texts import Followed, TextArrays, propose_matches, read_context
from lookahead.drafting.auto.weights import Columns, estimate

_LEAST_CHAINED = 0.001
"""A chain grows no further than to where it is accepted with this probability."""

UNLISTED_LOG = -7.0
"""Log-probability of a token that does not follow the rejected ones, where others do."""

_SURE_LOG = -1e-12
"""That of one that surely does: 0 stands for a token of which nothing is said."""

MOST_TRIED = 64
"""Most predictions that are tried after the root when nothing better is left."""

_KNOWN_SHARE = 0.25
"""What a prediction counts if the memory knows already what comes after it: what it teaches is worth less."""


class Wanted(NamedTuple):
    """Which nodes are wanted, a row for each text.

    Attributes:
        places: The place of each text, `[rows]`; -1 where nothing is wanted.
        nodes: Most nodes below its last token, `[rows]`.
        levels: Most levels of them, `[rows]`.
        least: How probable the path to a node must be, `[rows]`.
    """

    places: NDArray[np.int64]
    nodes: NDArray[np.int64]
    levels: NDArray[np.int64]
    least: NDArray[np.float64]


class Sources(NamedTuple):
    """Where proposals come from, and how they are weighed.

    Attributes:
        entries: The n-gram memory.
        texts: The texts.
        followed: Occurrences in a text that each node follows.
        heard: What the model said lately.
        listed: What the sources of a text list.
        columns: Where the features of each source are.
        weights: See `Weights.values`.
        surest: Highest probability of a token after another.
        chains: Whether a draft is one path: the likeliest token, and the likeliest after that.
        explores: Whether recent predictions are tried after the root, with nodes that nothing better takes.
    """

    entries: Entries
    texts: TextArrays
    followed: Followed
    heard: Heard
    listed: ListedArrays
    columns: Columns
    weights: NDArray[np.float64]
    surest: float
    chains: bool
    explores: bool


@compiled
def find(
    wanted: Wanted,
    sources: Sources,
    every: Nodes,
    proposals: Proposals,
    context: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Draft after some texts: add the most probable unexplored continuation again and again, until there are enough.

    Args:
        wanted: See there.
        sources: See there.
        every: Get the trees, each in its place.
        proposals: Room for what may follow the nodes of a tree.
        context: Room for the last tokens of a path, `[LONGEST]`.
        counts: Gets the number of nodes below the root of each tree, `[places]`.
    """
    for row in range(len(wanted.places)):
        place = wanted.places[row]
        if place >= 0:
            counts[place] = _find(row, place, wanted, sources, nodes_of(place, every), proposals, context)


@inner
def _find(
    row: int,
    place: int,
    wanted: Wanted,
    sources: Sources,
    nodes: Nodes,
    proposals: Proposals,
    context: NDArray[np.int64],
) -> int:
    """Draft after one text; returns how many nodes were found."""
    most, levels, least, chains = wanted.nodes[row], wanted.levels[row], wanted.least[row], sources.chains
    is_lost = sources.heard.shares[place] < UNTRUSTED
    begin_tree(proposals)
    nodes.depths[0], nodes.probabilities[0] = 0, 1.0
    count = node = FIRST
    while count < most:
        begin = begin_node(proposals)
        if chains:
            let_none_wait(proposals)
        if nodes.depths[node] < levels:
            size = read_context(place, node, len(context), nodes, sources.texts, context)
            known = _propose(place, node, size, nodes, proposals, sources, context)
            end = proposals.counts[0]
            estimate(begin, end, known, sources.weights, proposals)
            for found in range(begin, end):
                probability = nodes.probabilities[node] * min(proposals.estimates[found], sources.surest)
                proposals.estimates[found] = probability
                if probability >= least and is_useful(probability, 1 if chains else most, proposals):
                    push(found, proposals)
            if node == 0 and sources.explores and not is_lost:
                _try_recent(place, least, proposals, sources)
        if chains and node == 0:
            least = max(least, _LEAST_CHAINED)
        if proposals.waiting[0] == 0:
            break
        count += 1
        node = count
        _add(node, pop(proposals), nodes, proposals)
    return count


@inner
def _propose(
    place: int,
    node: int,
    size: int,
    nodes: Nodes,
    proposals: Proposals,
    sources: Sources,
    context: NDArray[np.int64],
) -> int:
    """Let each source propose what may follow a node. A new source that has to be asked at each node is a line here.

    Returns:
        Length of the longest context of the node that the memory knows.
    """
    columns = sources.columns
    known = propose_known(node, context, size, proposals, sources.entries, columns.memory)
    proposals.known[node] = known
    propose_matches(place, node, context, size, nodes, proposals, sources.texts, sources.followed, columns.matches)
    if node == 0:
        _propose_siblings(place, proposals, sources.heard, columns.siblings)
    propose_listed(node, nodes, proposals, sources.listed)
    return known


@inner
def _propose_siblings(place: int, proposals: Proposals, heard: Heard, column: int) -> None:
    """Propose after the root what the model said after the tokens that were rejected in its place."""
    count = heard.counts[place, 1]
    if count > 0:
        set_default(column, UNLISTED_LOG, proposals)
    for index in range(count):
        row = proposal_of(heard.siblings[place, index], FIRST, proposals)
        proposals.features[row, column] = min(max(log(heard.likely[place, index]), UNLISTED_LOG), _SURE_LOG)


@inner
def _try_recent(place: int, least: float, proposals: Proposals, sources: Sources) -> None:
    """Queue recent predictions after the root, behind all that is better, those first whose continuation is unknown."""
    heard = sources.heard
    for index in range(min(heard.counts[place, 0], MOST_TRIED)):
        token = heard.recent[place, index]
        probability = 0.001 / (4.0 + index) * (_KNOWN_SHARE if entry_after(token, sources.entries) >= 0 else 1.0)
        if probability >= least and not is_proposed(token, FIRST, proposals):
            row = len(proposals.tokens) - 1 - index
            proposals.tokens[row], proposals.nodes[row] = token, 0
            proposals.estimates[row], proposals.orders[row] = probability, 0
            proposals.features[row, :] = 0.0
            push(row, proposals)


@inner
def _add(node: int, row: int, nodes: Nodes, proposals: Proposals) -> None:
    """Add a proposal to the tree."""
    parent = proposals.nodes[row]
    nodes.tokens[node] = proposals.tokens[row]
    nodes.parents[node] = parent
    nodes.depths[node] = nodes.depths[parent] + 1
    nodes.probabilities[node] = proposals.estimates[row]
    nodes.orders[node] = proposals.orders[row]
    for column in range(proposals.features.shape[1]):
        nodes.features[node, column] = proposals.features[row, column]
