"""The search of `preset="auto"`: all sources propose, and the most probable continuation is added next."""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.learning import UNTRUSTED
from lookahead.drafting.auto.ngrams import Entries, entry_after, propose_known
from lookahead.drafting.auto.proposals import (
    Proposals,
    begin_node,
    begin_tree,
    is_proposed,
    is_useful,
    let_none_wait,
    pop,
    power_of,
    proposal_of,
    push,
    set_default,
)
from lookahead.drafting.auto.sources import ListedArrays, propose_listed
from lookahead.drafting.auto.texts import TextArrays, propose_matches, read_context
from lookahead.drafting.auto.weights import estimate

_LEAST_CHAINED = 0.001
"""A chain grows no further than to where it is accepted with this probability."""

UNLISTED_LOG = -7.0
"""Log-probability of a token that does not follow the rejected ones, where others do."""

_SURE_LOG = -1e-12
"""That of one that surely does: 0 stands for a token of which nothing is said."""

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
        heard: What the model said lately of each, `HEARD`s, `[places]`.
        listed: What the sources of a text list.
        weights: See `build_weights`.
        settings: See `SETTINGS`.
    """

    entries: Entries
    texts: TextArrays
    heard: NDArray[Any]
    listed: ListedArrays
    weights: NDArray[np.float64]
    settings: Any


class Room(NamedTuple):
    """Room for the search of one tree.

    Attributes:
        proposals: What may follow its nodes.
        followed: `OCCURRENCE`s in the text that each node follows, `[nodes, SEARCHED]`.
        context: The last tokens of a path, `[LONGEST]`.
    """

    proposals: Proposals
    followed: NDArray[Any]
    context: NDArray[np.int64]


@compiled
def find(wanted: Wanted, sources: Sources, room: Room, trees: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """Draft after some texts: add the most probable unexplored continuation again and again, until there are enough.

    Args:
        wanted: See there.
        sources: See there.
        room: See there.
        trees: Get the trees, each in its place, `NODE`s, `[places, nodes]`.
        counts: Gets the number of nodes below the root of each tree, `[places]`.
    """
    places, most, levels, least = wanted
    for row in range(len(places)):
        place = places[row]
        if place >= 0:
            counts[place] = _find(place, most[row], levels[row], least[row], sources, room, trees[place])


@inner
def _find(place: int, most: int, levels: int, least: float, sources: Sources, room: Room, nodes: NDArray[Any]) -> int:
    """Draft after one text; returns how many nodes were found."""
    entries, texts, heard, listed, weights, settings = sources
    proposals, followed, context = room
    rows, search = proposals.rows, proposals.search
    chains, of_text = settings["chains"], heard[place]
    begin_tree(proposals)
    nodes[0]["depth"], nodes[0]["probability"] = 0, 1.0
    count = node = FIRST
    while count < most:
        begin = begin_node(proposals)
        if chains:
            let_none_wait(search)
        if nodes[node]["depth"] < levels:
            # All sources propose what may follow the node: a new one is a line here.
            size = read_context(place, node, nodes, texts, context)
            known = propose_known(node, context, size, proposals, entries)
            propose_matches(place, node, context, size, nodes, proposals, texts, followed)
            if node == 0:
                _propose_siblings(proposals, of_text)
            propose_listed(node, nodes, proposals, listed)
            nodes[node]["known"] = known
            estimate(begin, search["count"], known, weights, proposals, entries.evidence)
            for found in range(begin, search["count"]):
                probability = nodes[node]["probability"] * min(rows[found]["estimate"], settings["surest"])
                rows[found]["estimate"] = probability
                if probability >= least and is_useful(probability, 1 if chains else most, search):
                    push(found, proposals)
            if node == 0 and settings["explores"] and of_text["share"] >= UNTRUSTED:
                _try_recent(most, least, proposals, of_text, entries)
        if chains and node == 0:
            least = max(least, _LEAST_CHAINED)
        if search["waiting"] == 0:
            break
        count += 1
        node = count
        _add(nodes[node], nodes, pop(proposals), proposals)
    return count


@inner
def _propose_siblings(proposals: Proposals, of_text: Any) -> None:
    """Propose after the root the model's predictions after its rejected siblings."""
    logs, siblings, likely = proposals.logs, of_text["siblings"], of_text["likely"]
    column = logs.shape[1] - 1
    if of_text["listed"] > 0:
        set_default(column, UNLISTED_LOG, proposals)
    for index in range(of_text["listed"]):
        row = proposal_of(siblings[index], FIRST, proposals)
        logs[row, column] = min(max(log(likely[index]), UNLISTED_LOG), _SURE_LOG)


@inner
def _try_recent(most: int, least: float, proposals: Proposals, of_text: Any, entries: Entries) -> None:
    """Queue recent predictions after the root, behind all that is better, those first whose continuation is unknown."""
    rows, recent = proposals.rows, of_text["recent"]
    for index in range(of_text["count"]):
        token = recent[index]
        probability = 0.001 / (4.0 + index)
        if probability < least or power_of(probability) > proposals.search["power"]:
            break  # there are enough that are better
        if is_proposed(token, FIRST, proposals):
            continue
        if entry_after(token, entries) >= 0:
            probability *= _KNOWN_SHARE
        if probability >= least and is_useful(probability, most, proposals.search):
            row = len(rows) - 1 - index
            proposal = rows[row]
            proposal["token"], proposal["node"], proposal["estimate"] = token, 0, probability
            proposal["order"], proposal["match"], proposal["listed"] = 0, -1, 1
            proposals.logs[row, proposals.logs.shape[1] - 1] = 0.0
            push(row, proposals)


@inner
def _add(node: Any, nodes: NDArray[Any], row: int, proposals: Proposals) -> None:
    """Add a proposal to the tree."""
    proposal, sibling = proposals.rows[row], proposals.logs[row, proposals.logs.shape[1] - 1]
    node["token"], node["parent"], node["probability"] = proposal["token"], proposal["node"], proposal["estimate"]
    node["depth"] = nodes[proposal["node"]]["depth"] + 1
    node["order"], node["match"] = proposal["order"], proposal["match"]
    node["weighed"] = 1 - proposal["listed"]
    node["sibling"] = 1 if proposal["node"] == 0 and UNLISTED_LOG < sibling < 0 else 0
