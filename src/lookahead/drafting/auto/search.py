"""Search of `preset="auto"`: all sources propose, and the most probable continuation is added next.

Rows of several numbers are numpy records, because compiled loops take each array of records as one argument.
"""

from __future__ import annotations

from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.core.ranking import count_ranked, least_ranked
from lookahead.core.token_tree import Noise
from lookahead.drafting.auto.learning import UNTRUSTED, BatchState
from lookahead.drafting.auto.ngrams import look_up
from lookahead.drafting.auto.sources import MOST_LISTED, follow_listed
from lookahead.drafting.auto.texts import MATCH_CLASSES, find_matches, read_context

NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),  # parent node
        ("depth", np.int64),  # levels below the root
        ("order", np.int64),  # length of the longest context in the memory that predicts it; 0 for none
        ("match", np.int64),  # class of its longest context match, -1 for none
        ("weighed", np.int64),  # 1 if its probability is from weighted evidence, which its outcome then corrects
        ("matches", np.int64),  # number of earlier occurrences of its path
        ("listed", np.float64),  # minimum probability after its parent, from guesses or a source
        ("source", np.int64),  # index of this source; -1 for none
        ("probability", np.float64),  # estimated probability that the path to it is accepted
        ("offered", np.float64),  # probability used for pacing; recent predictions sort last whatever theirs is
    ]
)
"""A node of a draft, the most probable first; node 0 is the root, the last token of the text.

The trees of all texts are `[places, nodes]`.
"""

_GUESSES_COUNT = 0.25
"""Minimum probability of a guess, as a fraction of its probability after the rejected sibling."""

_RECENT_SHARE = 0.2
"""Probability of the recent prediction of rank r, times r + 4, as a fraction of the remaining probability."""

FORESEEN = 8
"""Maximum number of tokens with known sampling noise ahead of the text."""

_COPIED_ODDS = log(4.0)
_COPIED_WEIGHT = 12.0
"""Log-odds of matches in a text from which it counts as a copy, and weight of the surplus in scores of matches."""

_LEAST_NOISE = float(np.finfo(np.float32).tiny)
"""Lower limit of noise, because 16-bit noise may be rounded to 0."""

NO_NOISE = Noise((np.zeros(0, dtype=np.float32),) * FORESEEN, 0.0)
"""Noise of tokens that are not sampled, or of unknown noise."""


def padded_noise(noise: Noise) -> Noise:
    """Return the noise of exactly `FORESEEN` places, empty where it is unknown."""
    return Noise((*noise.places, *NO_NOISE.places)[:FORESEEN], noise.temperature)


LIMITS = np.dtype(
    [
        ("place", np.int64),  # slot of the text; -1 for no search
        ("nodes", np.int64),  # maximum number of nodes below the root
        ("levels", np.int64),  # maximum depth
        ("min_probability", np.float64),  # minimum probability of a path
    ]
)
"""Limits of the search after a text."""


class Room(NamedTuple):
    """Buffers for the search of one tree.

    Attributes:
        candidates: `NODE`s that may be added; children of one node are adjacent.
        queue: Indices of the likeliest candidates, likeliest first, added ones in front, `[nodes]`.
        followed: `OCCURRENCE`s in the text of each node's path, `[nodes, SEARCHED]`.
        context: The last tokens of a path, `[LONGEST]`.
        slots: Slots in the memory of the last 1, 2, ... tokens of a path, `[orders]`.
    """

    candidates: NDArray[Any]
    queue: NDArray[np.int64]
    followed: NDArray[Any]
    context: NDArray[np.int64]
    slots: NDArray[np.int64]


@compiled
def find(limits: NDArray[Any], noise: Noise, state: BatchState, room: Room, ranking: NDArray[np.int64]) -> None:
    """Draft after some texts: repeatedly add the most probable candidate, up to the limit of nodes.

    Args:
        limits: `LIMITS`s, `[rows]`.
        noise: Sampling noise of tokens on each of `FORESEEN` levels; arrays may be empty.
        state: Texts and evidence; receives the trees and their numbers of nodes below the root.
        room: Buffers.
        ranking: Candidates of the step so far. Unlikelier ones are not searched once its capacity is full.
    """
    chains = state.settings["chains"]
    explores = state.settings["explores"]
    for row in range(len(limits)):
        of_row = limits[row]
        place = of_row["place"]
        max_nodes = of_row["nodes"]
        if place < 0:
            continue
        nodes = state.trees[place]
        nodes[0]["depth"], nodes[0]["probability"] = 0, 1.0
        node = waiting = end = FIRST
        while node < max_nodes:
            begin = end
            if chains:  # a chain adds one node at each level
                waiting = node
            least = max(of_row["min_probability"], least_ranked(ranking))
            if nodes[node]["depth"] < of_row["levels"] and nodes[node]["probability"] >= least:
                end = _propose(place, node, begin, noise, state, room, nodes)
                for candidate in range(begin, end):
                    waiting = _wait(candidate, least, waiting, node + 1 if chains else max_nodes, room)
                if node == 0 and explores and state.feedback[place]["share"] >= UNTRUSTED:
                    end, waiting = _try_recent(end, waiting, of_row, noise, state, room)
            if node == waiting:
                break
            node += 1
            nodes[node] = new = room.candidates[room.queue[node - 1]]
            nodes[node]["offered"] = max(new["probability"], new["listed"] if new["parent"] == 0 else 0.0)
            count_ranked(new["probability"], ranking)
        state.counts[place] = node


@compiled
def list_offers(
    places: NDArray[np.int64],
    nodes: int,
    vocabulary: int,
    trees: NDArray[Any],
    counts: NDArray[np.int64],
    likely: NDArray[np.float64],
    offered: NDArray[np.int64],
) -> int:
    """Write the probabilities of candidates to `likely`, and their numbers to `offered`; see `DraftBatch.offers`.

    Returns:
        Number of candidates.
    """
    end = FIRST
    for row in range(len(places)):
        draft = trees[places[row]]
        begin = end
        for node in range(1, min(counts[places[row]], nodes) + 1):
            if draft[node]["token"] >= vocabulary:
                break
            likely[end] = draft[node]["offered"]
            end += 1
        offered[row] = end - begin
    return end


@compiled
def take_nodes(
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    trees: NDArray[Any],
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
) -> None:
    """Write the tokens and parents of the first `counts` nodes of some drafts, draft after draft."""
    end = FIRST
    for row in range(len(places)):
        draft = trees[places[row]]
        for node in range(1, counts[row] + 1):
            tokens[end], parents[end] = draft[node]["token"], draft[node]["parent"]
            end += 1


@inner
def _propose(
    place: int, node: int, begin: int, noise: Noise, state: BatchState, room: Room, nodes: NDArray[Any]
) -> int:
    """Write the candidates after a node from index `begin` on, with the probabilities of their paths; return their end.

    All sources propose here; a new source is a new loop.
    """
    entries, texts, feedback, _, listed, _, _, weights, settings = state
    candidates, _, followed, context, slots = room
    of_text = feedback[place]
    end = begin
    size = read_context(place, node, nodes, texts, context)
    longest = look_up(context, size, entries, slots)
    coefficients = weights[1 if settings["observes"] or of_text["share"] < UNTRUSTED else 0, longest]
    floors = 0.0  # score of a token that is not listed in the memory
    for order in range(longest):
        floors += coefficients[1 + order] * float(entries.heads[order, slots[order]]["floor"])
    for order in range(longest):
        slot = slots[order]
        weight = coefficients[1 + order]
        floor = float(entries.heads[order, slot]["floor"])
        for follower in entries.followers[order, slot]:
            if follower["token"] < 0:
                break
            row = _candidate_of(np.int64(follower["token"]), begin, end, floors, candidates)
            end += row == end
            candidate = candidates[row]
            candidate["order"] = order + 1
            candidate["probability"] += weight * (float(follower["log"]) - floor)
    matches = find_matches(place, node, context, size, nodes, texts, followed)
    for match in range(matches):
        occurrence = followed[node, match]
        row = _candidate_of(texts.tokens[place, occurrence["place"]], begin, end, floors, candidates)
        end += row == end
        candidate = candidates[row]
        known = occurrence["length"]
        while candidate["match"] + 1 < len(MATCH_CLASSES) and known >= MATCH_CLASSES[candidate["match"] + 1]:
            candidate["match"] += 1
    for rank in range(of_text["guessed"] if node == 0 else 0):
        row = _candidate_of(of_text["guesses"][rank], begin, end, floors, candidates)
        end += row == end
        candidates[row]["listed"] = _GUESSES_COUNT * of_text["likely"][rank]
    for source in range(len(listed.record)):
        at = follow_listed(source, node, nodes, listed)
        count = FIRST
        record = listed.record[source]
        for number in range(at + 1, len(listed.tokens) if at >= 0 else 0):
            new = listed.tokens[number]
            if new["parent"] == at and count < MOST_LISTED:
                row = _candidate_of(new["token"], begin, end, floors, candidates)
                count += 1
                end += row == end
                candidate = candidates[row]
                likely = min(new["probability"] * record[0] / record[1], 1.0)
                if likely > candidate["listed"]:
                    candidate["listed"], candidate["source"] = likely, source
    copied = log(of_text["copied"][0] / of_text["copied"][1])
    _weigh(node, nodes, noise, coefficients, copied, entries.evidence, candidates[begin:end])
    return end


@inner
def _candidate_of(token: int, begin: int, end: int, score: float, candidates: NDArray[Any]) -> int:
    """Return the index of the candidate with this token between `begin` and `end`; without one, add it at `end`."""
    row = _place_of(token, begin, end, candidates)
    if row == end:
        _add_candidate(token, end, score, candidates)
    return row


@inner
def _place_of(token: int, begin: int, end: int, candidates: NDArray[Any]) -> int:
    """Return the index of the candidate with this token between `begin` and `end`; without one, `end`."""
    for row in range(begin, end):
        if candidates[row]["token"] == token:
            return row
    return end


@inner
def _add_candidate(token: int, row: int, score: float, candidates: NDArray[Any]) -> None:
    new = candidates[row]
    new["token"], new["order"], new["match"], new["probability"] = token, 0, -1, score
    new["listed"], new["source"] = 0.0, -1


@inner
def _weigh(
    node: int,
    nodes: NDArray[Any],
    noise: Noise,
    weights: NDArray[np.float64],
    copied: float,
    evidence: NDArray[np.float64],
    candidates: NDArray[Any],
) -> None:
    """Turn scores of the candidates after a node into probabilities, and set their parent and depth.

    Candidates from neither memory nor matches have no score: their probability is `listed`, which is also the minimum
    of others. Tokens that only matches propose have a score higher by `copied`; in a copy, all tokens of matches have a
    higher one. `evidence` corrects the probabilities from scores; see `Entries`.
    """
    copy = _COPIED_WEIGHT * max(copied - _COPIED_ODDS, 0.0)
    mass = exp(weights[0])
    parent = nodes[node]
    classes = evidence.shape[1]  # the weights of matches follow the weights of contexts
    for row in range(len(candidates)):
        candidate = candidates[row]
        score = candidate["probability"] + _foreseen(candidate["token"], parent["depth"], noise)
        if candidate["match"] >= 0:
            score += weights[classes + candidate["match"]] + copy + (copied if candidate["order"] == 0 else 0.0)
        candidate["probability"] = exp(score) if candidate["match"] >= 0 or candidate["order"] > 0 else 0.0
        mass += candidate["probability"]
    for row in range(len(candidates)):
        candidate = candidates[row]
        record = evidence[1 + candidate["match"], candidate["order"]]
        likely = candidate["probability"] / mass * record[0] / record[1]
        candidate["weighed"] = 1 if likely >= candidate["listed"] else 0
        likely = min(max(likely, candidate["listed"]), 1.0)
        candidate["probability"] = parent["probability"] * likely
        candidate["parent"], candidate["depth"] = node, parent["depth"] + 1


@inner
def _foreseen(token: int, level: int, noise: Noise) -> float:
    """Return the noise term of a token's score on a level.

    The sampler selects the largest log p - temperature * log q, and scores estimate log p.
    """
    if level >= FORESEEN or token >= len(noise.places[level]):
        return 0.0
    return -noise.temperature * log(max(float(noise.places[level][token]), _LEAST_NOISE))


@inner
def _wait(row: int, min_probability: float, waiting: int, capacity: int, room: Room) -> int:
    """Queue a candidate if it is likely enough and among the likeliest `capacity`; return the length of the queue."""
    candidates = room.candidates
    queue = room.queue
    probability = candidates[row]["probability"]
    at = min(waiting, capacity - 1)
    if probability < min_probability or (at < waiting and probability <= candidates[queue[at]]["probability"]):
        return waiting
    while at > 0 and probability > candidates[queue[at - 1]]["probability"]:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = row
    return min(waiting + 1, capacity)


@inner
def _try_recent(end: int, waiting: int, limits: Any, noise: Noise, state: BatchState, room: Room) -> tuple[int, int]:
    """Queue recent predictions after the root, behind better candidates.

    In greedy texts their `listed` is a share of the remaining probability, for the pace.

    Returns:
        End of the candidates, and length of the queue.
    """
    place = limits["place"]
    known = end  # recent predictions differ from one another
    record = state.entries.evidence[0, 0]
    rest = 1.0
    for row in range(end):
        rest -= room.candidates[row]["probability"]
    share = max(rest, 0.0) * _RECENT_SHARE * record[0] / record[1] if noise.temperature == 0.0 else 0.0
    for index in range(state.feedback[place]["count"]):
        token = state.recent[place, index]
        probability = 0.001 / (4.0 + index) * exp(_foreseen(token, FIRST, noise))
        if probability < limits["min_probability"] and noise.temperature > 0.0:
            continue
        if _place_of(token, FIRST, known, room.candidates) == known:
            _add_candidate(token, end, min(probability, 1.0), room.candidates)
            new = room.candidates[end]
            new["parent"], new["depth"], new["listed"] = 0, 1, share / (4.0 + index)
            new["weighed"] = 1 if share > 0.0 else 0
            before = waiting
            waiting = _wait(end, limits["min_probability"], waiting, limits["nodes"], room)
            end = end + 1
            if waiting == before and noise.temperature == 0.0:
                break  # the queue is full of better ones
    return end, waiting
