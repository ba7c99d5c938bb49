"""What a step teaches about the texts that it was for: one loop over all of them.

What the model said after each node goes to the n-gram memory, what it said after tokens that were rejected in the place
of the one selected is kept for the next draft, and so is what it thought of lately. All that counts as far as its
predictions are what is selected: not where processors or a grammar decide otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.ngrams import EVIDENCE_PRIOR, Entries, Writing, write_entry
from lookahead.drafting.auto.proposals import MOST_LISTED
from lookahead.drafting.auto.texts import TextArrays, append, begin_text, read_context

UNTRUSTED = 0.35
"""Share of selected tokens that were predicted below which predictions that are not on the path teach nothing."""

_KEPT, _KEPT_SAMPLED = 0.9, 0.98
"""What is left of the weight of a token with each that follows; of sampled ones, by which little is told, more."""

_SURE = 0.5
"""Share from which predictions are believed in full when sampling: that it is not 1 may be chance."""

_EVIDENCE_KEPT = 0.995
"""What is left of the record of a kind of evidence after each step of a text."""

_READ, MOST_TRIED = 512, 64
"""Tokens at the end of a prompt that are looked at, and recent predictions that are kept to be tried."""

_ROOM = 16 * MOST_LISTED
"""Tokens that are told apart among what the model says after rejected ones."""


HEARD = np.dtype(
    [
        # How many of the latest selected tokens its predictions account for, and how many they would if they were
        # right. Where the likeliest token is selected, these are the tokens that are it. Where tokens are sampled,
        # they are as probable in the mean as the distribution says.
        ("agreed", np.float64),
        ("expected", np.float64),
        ("share", np.float64),  # the one over the other
        ("count", np.int64),  # of `recent`
        ("recent", np.int64, (MOST_TRIED,)),  # end of the prompt and what it predicted since, each once, latest first
        ("listed", np.int64),  # how many `siblings` are
        ("siblings", np.int64, (MOST_LISTED,)),  # what follows the tokens rejected in the root's place, likeliest first
        ("likely", np.float64, (MOST_LISTED,)),  # how likely these are
    ]
)
"""What the model said lately about a text."""

SETTINGS = np.dtype(
    [
        ("surest", np.float64),  # highest probability of a token after another
        ("chains", np.int64),  # whether a draft is one path: the likeliest token, and the likeliest after that
        ("explores", np.int64),  # whether recent predictions are tried after the root, where nothing better is left
        ("observes", np.int64),  # whether what was selected stands for what the model predicts, which is not known
        ("rejected", np.int64),  # after so many rejected tokens of a row, at most, what the model says is learned
    ]
)
"""How the texts of a batch are drafted for and learned from."""


class Step(NamedTuple):
    """What a step showed, a row for each text, and one row's nodes after another's.

    Attributes:
        places: The place of each text, `[rows]`; -1 where the step added nothing.
        ends: Where the nodes of each row end, `[rows]`.
        tokens: The tokens that the step added to the texts, row after row.
        added: How many of them are of each row, `[rows]`.
        samples: 1 where tokens are sampled, 0 where the likeliest ones are selected, `[rows]`.
        nodes: Which node of its tree each one is: 0 for the last token of the text, -1 for the one before it, and so
            on, `[nodes]`; ascending in each row.
        ids: The likeliest tokens after each, likeliest first, `[nodes, listed]`; -1 where nothing was read. They are
            written over.
        probabilities: Their probabilities, likewise.
    """

    places: NDArray[np.int64]
    ends: NDArray[np.int64]
    tokens: NDArray[np.int64]
    added: NDArray[np.int64]
    samples: NDArray[np.int64]
    nodes: NDArray[np.int64]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


class Desk(NamedTuple):
    """Room for what a step teaches.

    Attributes:
        following: The token that was selected after each of its nodes, -1 for those that are not of the text now.
        context: Last tokens of a path, `[longest context]`.
        tokens, shares: What is ordered anew: recent predictions or continuations.
    """

    following: NDArray[np.int64]
    context: NDArray[np.int64]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]


def allocate_desk(nodes: int, orders: int) -> Desk:
    """Room for steps of so many nodes in all, and contexts of up to `orders` tokens."""
    following, context = (np.zeros(size, dtype=np.int64) for size in (nodes, orders))
    return Desk(following, context, np.zeros(_ROOM, dtype=np.int64), np.zeros(_ROOM))


@compiled
def go_on(
    place: int, before: int, tokens: NDArray[np.int64], texts: TextArrays, heard: NDArray[Any], settings: Any
) -> None:
    """Extend the text in a place by these tokens, without predictions.

    Where `before` is not below 0 they begin a new text there, which is those from `before` on; those in front are
    searched with it.
    """
    of_text = heard[place]
    of_text["listed"] = 0
    if before >= 0:
        begin_text(place, texts)
        texts.dropped[place] = -before
        of_text["agreed"] = of_text["expected"] = of_text["share"] = 1.0
        of_text["count"] = 0
        at = len(tokens) - 1
        while settings["explores"] and at >= max(before, len(tokens) - _READ):
            of_text["count"] = _add_recent(tokens[at], of_text["count"], of_text["recent"])
            at -= 1
    append(place, tokens, FIRST, len(tokens), texts)


@compiled
def learn(
    step: Step,
    clock: int,
    trees: NDArray[Any],
    texts: TextArrays,
    heard: NDArray[Any],
    entries: Entries,
    writing: Writing,
    desk: Desk,
    settings: Any,
) -> int:
    """Learn from a step, and let the texts go on; returns how many drafted tokens were accepted.

    Args:
        step: What it showed.
        clock: Dates what is written to the memory.
        trees: Those that were found after the texts, `NODE`s, `[places, nodes]`.
        texts, heard, entries, writing, desk, settings: See there.
    """
    places, ends, tokens, added, samples, at_nodes, ids, probabilities = step
    following, context, room, _ = desk
    accepted = 0
    for is_text in (False, True):  # what is text now comes last, so that it counts
        begin = first = FIRST
        for row in range(len(places)):
            place, end, last = places[row], ends[row], first + added[row]
            if place >= 0:
                nodes, of_text, of_row = trees[place], heard[place], at_nodes[begin:end]
                said, likely, selected = ids[begin:end], probabilities[begin:end], following[begin:end]
                if not is_text:
                    accepted += _follow(of_row, tokens[first:last], nodes, said, selected)
                    _weigh_evidence(of_row, nodes, selected, entries.evidence)
                    if not settings["observes"]:
                        _compare(samples[row], said, likely, selected, of_text)
                    if settings["observes"] or of_text["share"] < UNTRUSTED:
                        _believe(said, likely, selected)
                    _list_siblings(of_row, nodes, said, likely, selected, of_text, desk)
                written = 0
                for at in range(len(of_row)):
                    if (of_row[at] <= 0 or selected[at] >= 0) == is_text and said[at, 0] >= 0:
                        if not is_text and written >= settings["rejected"]:
                            break
                        written += 1
                        size = read_context(place, of_row[at], nodes, texts, context)
                        write_entry(context[:size], said[at], likely[at], clock, entries, writing)
                if is_text:
                    if settings["explores"]:
                        _note_recent(of_row, said, selected, of_text, room)
                    append(place, tokens, first, last, texts)
            begin, first = end, last
    return accepted


@inner
def _follow(
    of_row: NDArray[np.int64],
    tokens: NDArray[np.int64],
    nodes: NDArray[Any],
    said: NDArray[np.int64],
    selected: NDArray[np.int64],
) -> int:
    """Note the token that was selected after each node: the selected tokens are a path below the root.

    Returns:
        How many of them were drafted. If they are no path of this draft, none, and nothing is known of its nodes.
    """
    at = 0
    for index in range(len(of_row)):
        selected[index] = -1
        if of_row[index] <= 0:
            at = index  # the root, in the end
    for count in range(len(tokens)):
        selected[at] = tokens[count]
        child = -1
        for other in range(at + 1, len(of_row)):
            node = nodes[of_row[other]]
            if node["parent"] == of_row[at] and node["token"] == tokens[count]:
                child = other
        if child < 0:
            if count + 1 < len(tokens):
                for index in range(len(of_row)):
                    selected[index] = said[index, 0] = -1
                return 0
            return count
        at = child
    return len(tokens)


@inner
def _weigh_evidence(
    of_row: NDArray[np.int64], nodes: NDArray[Any], selected: NDArray[np.int64], evidence: NDArray[np.float64]
) -> None:
    """Note how often drafted tokens came true, by kind of evidence; of those before, a little is forgotten."""
    for match in range(evidence.shape[0]):
        for order in range(evidence.shape[1]):
            for count in range(2):
                evidence[match, order, count] -= (1 - _EVIDENCE_KEPT) * (evidence[match, order, count] - EVIDENCE_PRIOR)
    for at in range(1, len(of_row)):
        node = nodes[max(of_row[at], 0)]
        parent = at - 1
        while of_row[at] > 0 and of_row[parent] != node["parent"]:
            parent -= 1
        if of_row[at] > 0 and selected[parent] >= 0 and node["weighed"]:
            record = evidence[1 + node["match"], node["order"]]
            record[0] += 1.0 if selected[parent] == node["token"] else 0.0
            corrected = node["probability"] / nodes[node["parent"]]["probability"]
            record[1] += min(corrected, 1.0) * record[1] / record[0]


@inner
def _compare(
    samples: int, said: NDArray[np.int64], likely: NDArray[np.float32], selected: NDArray[np.int64], of_text: Any
) -> None:
    """Compare the selected tokens with the model's predictions of them."""
    is_listed = samples > 0 and said.shape[1] > 1
    kept = _KEPT_SAMPLED if is_listed else _KEPT
    for at in range(len(selected)):
        if selected[at] < 0 or said[at, 0] < 0:
            continue
        agreed, expected = 1.0 if said[at, 0] == selected[at] else 0.0, 1.0
        if is_listed:
            agreed = expected = 0.0
            for rank in range(said.shape[1]):
                share = float(likely[at, rank])
                expected += share * share
                agreed += share if said[at, rank] == selected[at] else 0.0
        of_text["agreed"] = kept * of_text["agreed"] + agreed
        of_text["expected"] = kept * of_text["expected"] + expected
    share = min(of_text["agreed"] / of_text["expected"], 1.0)
    of_text["share"] = 1.0 if samples > 0 and share > _SURE else share


@inner
def _believe(said: NDArray[np.int64], likely: NDArray[np.float32], selected: NDArray[np.int64]) -> None:
    """Write what was selected over predictions that account for too little of it, or are not known; then nothing is
    known about nodes that are not on the path."""
    for at in range(len(selected)):
        for rank in range(said.shape[1]):
            said[at, rank], likely[at, rank] = -1, 0.0
        said[at, 0], likely[at, 0] = selected[at], 1.0


@inner
def _list_siblings(
    of_row: NDArray[np.int64],
    nodes: NDArray[Any],
    said: NDArray[np.int64],
    likely: NDArray[np.float32],
    selected: NDArray[np.int64],
    of_text: Any,
    desk: Desk,
) -> None:
    """Keep what the model says after the nodes in whose place another token was selected last, each of them as likely
    as it was: it often says the same after the right one."""
    _, _, tokens, shares = desk
    before, count, total = 0, 0, 0.0
    for at in range(len(of_row)):
        before = at if selected[at] >= 0 else before
    for at in range(before + 1, len(of_row)):
        node = nodes[of_row[at]]
        if node["parent"] != of_row[before]:
            continue
        for rank in range(said.shape[1]):
            token = said[at, rank]
            if token < 0:
                break
            found = 0
            while found < count and tokens[found] != token:
                found += 1
            if found == len(tokens):
                continue
            if found == count:
                tokens[found], shares[found] = token, 0.0
                count += 1
            shares[found] += node["probability"] * float(likely[at, rank])
    for index in range(count):
        total += shares[index]
    of_text["listed"] = min(count, MOST_LISTED)
    siblings, of_siblings = of_text["siblings"], of_text["likely"]
    for rank in range(of_text["listed"]):
        best = rank
        for other in range(rank + 1, count):
            best = other if shares[other] > shares[best] else best
        token, share = tokens[best], shares[best]
        for other in range(best, rank, -1):
            tokens[other], shares[other] = tokens[other - 1], shares[other - 1]
        tokens[rank], shares[rank] = token, share
        siblings[rank], of_siblings[rank] = token, share / total


@inner
def _note_recent(
    of_row: NDArray[np.int64],
    said: NDArray[np.int64],
    selected: NDArray[np.int64],
    of_text: Any,
    fresh: NDArray[np.int64],
) -> None:
    """Put the two likeliest tokens after each node before the recent predictions, those after what is text now last."""
    recent, count = of_text["recent"], FIRST
    for rank in range(min(said.shape[1], 2)):
        for is_text in (False, True):
            for at in range(len(of_row)):
                if (of_row[at] <= 0 or selected[at] >= 0) == is_text and said[at, 0] >= 0 and said[at, rank] >= 0:
                    count = _add_recent(said[at, rank], count, fresh)
    for index in range(of_text["count"]):
        count = _add_recent(recent[index], count, fresh)
    for index in range(count):
        recent[index] = fresh[index]
    of_text["count"] = count


@inner
def _add_recent(token: int, count: int, recent: NDArray[np.int64]) -> int:
    """Add a token to the first `count`, unless it is one of them or there are enough; returns how many there are."""
    if count == MOST_TRIED:
        return count
    for index in range(count):
        if recent[index] == token:
            return count
    recent[count] = token
    return count + 1
