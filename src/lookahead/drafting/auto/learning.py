"""What a step teaches about the texts that it was for: one loop over all of them.

What the model said after each node goes to the n-gram memory, what it said after tokens that were rejected in the place
of the one selected is kept for the next draft, and so is what it thought of lately. All that counts as far as its
predictions are what is selected: not where processors or a grammar decide otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.ngrams import Entries, Writing, write_entry
from lookahead.drafting.auto.proposals import MOST_LISTED, Nodes, nodes_of
from lookahead.drafting.auto.texts import TextArrays, append, begin_text, read_context

UNTRUSTED = 0.35
"""Share of selected tokens that were predicted below which predictions that are not on the path teach nothing."""

_KEPT, _KEPT_SAMPLED = 0.9, 0.98
"""What is left of the weight of a token with each that follows; of sampled ones, by which little is told, more."""

_SURE = 0.5
"""Share from which predictions are believed in full when sampling: that it is not 1 may be chance."""

_READ, _LATEST = 512, 128
"""Tokens at the end of a prompt, and recent predictions, that are kept to be tried."""

_ROOM = 16 * MOST_LISTED
"""Tokens that are told apart among what the model says after rejected ones."""


class Heard(NamedTuple):
    """What the model said lately about the text in each place.

    Attributes:
        agreed, expected: How many of the latest selected tokens its predictions account for, and how many they would if
            they were right, `[places]`. Where the likeliest token is selected, these are the tokens that are it. Where
            tokens are sampled, they are as probable in the mean as the distribution says.
        shares: The one over the other, `[places]`.
        recent: The end of the prompt and what it predicted since, each token once, latest first, `[places, latest]`.
        siblings: What follows the tokens that were rejected in the root's place, likeliest first, `[places, listed]`.
        likely: How likely these are, likewise.
        counts: How many `recent` and `siblings` are, `[places, 2]`.
    """

    agreed: NDArray[np.float64]
    expected: NDArray[np.float64]
    shares: NDArray[np.float64]
    recent: NDArray[np.int64]
    siblings: NDArray[np.int64]
    likely: NDArray[np.float64]
    counts: NDArray[np.int64]


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


class Lessons(NamedTuple):
    """How steps teach, and room for one.

    Attributes:
        observes: Whether what was selected stands for what the model predicts, which is not known.
        rejected: After so many rejected tokens of a row, at most, what the model says is learned.
        explores: Whether recent predictions are kept.
        context: Last tokens of a path, `[longest context]`.
        tokens, shares: What is ordered anew: recent predictions or continuations.
    """

    observes: bool
    rejected: int
    explores: bool
    context: NDArray[np.int64]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]


def allocate_heard(places: int) -> Heard:
    """Room for what is said of so many texts."""
    agreed, expected, shares = np.ones((3, places))
    recent = np.zeros((places, _LATEST), dtype=np.int64)
    siblings, counts = (np.zeros((places, size), dtype=np.int64) for size in (MOST_LISTED, 2))
    likely = np.zeros((places, MOST_LISTED))
    return Heard(agreed, expected, shares, recent, siblings, likely, counts)


def allocate_lessons(observes: bool, rejected: int, explores: bool, orders: int) -> Lessons:
    """Room for lessons about contexts of up to `orders` tokens."""
    context, tokens = (np.zeros(size, dtype=np.int64) for size in (orders, _ROOM))
    return Lessons(observes, rejected, explores, context, tokens, np.zeros(_ROOM))


@compiled
def begin(
    place: int, before: int, tokens: NDArray[np.int64], texts: TextArrays, heard: Heard, lessons: Lessons
) -> None:
    """Begin the text in a place, which is `tokens` from `before` on; those before that are searched with it."""
    begin_text(place, texts)
    texts.dropped[place] = -before
    append(place, tokens, FIRST, len(tokens), texts)
    heard.agreed[place] = heard.expected[place] = heard.shares[place] = 1.0
    heard.counts[place, :] = 0
    if lessons.explores:
        at, count = len(tokens) - 1, 0
        while at >= max(before, len(tokens) - _READ) and count < _LATEST:
            count = _add_recent(tokens[at], count, heard.recent[place])
            at -= 1
        heard.counts[place, 0] = count


@compiled
def extend(place: int, tokens: NDArray[np.int64], texts: TextArrays, heard: Heard) -> None:
    """The text in a place goes on with these tokens, of which nothing else is known."""
    append(place, tokens, FIRST, len(tokens), texts)
    heard.counts[place, 1] = 0


@compiled
def learn(
    step: Step,
    clock: int,
    every: Nodes,
    texts: TextArrays,
    heard: Heard,
    entries: Entries,
    writing: Writing,
    lessons: Lessons,
    following: NDArray[np.int64],
) -> int:
    """Learn from a step, and let the texts go on; returns how many drafted tokens were accepted.

    Args:
        step: What it showed.
        clock: Dates what is written to the memory.
        every: The trees that were found after the texts.
        texts, heard, entries, writing, lessons: See there.
        following: Gets the token that was selected after each node, -1 for nodes that are not of the text now,
            `[nodes]`.
    """
    accepted = 0
    for is_text in (False, True):  # what is text now comes last, so that it counts
        begin = first = FIRST
        for row in range(len(step.places)):
            place, end, last = step.places[row], step.ends[row], first + step.added[row]
            if place >= 0:
                nodes = nodes_of(place, every)
                if not is_text:
                    accepted += _follow(begin, end, step.tokens[first:last], nodes, step, following)
                    share = _compare(place, begin, end, step.samples[row], step, heard, following, lessons.observes)
                    _believe(begin, end, share, step, following, lessons.observes)
                    _list_siblings(place, begin, end, nodes, step, heard, following, lessons)
                _write(place, begin, end, is_text, step, clock, nodes, texts, entries, writing, lessons, following)
                if is_text:
                    if lessons.explores:
                        _note_recent(place, begin, end, step, heard, following, lessons.tokens)
                    append(place, step.tokens, first, last, texts)
            begin, first = end, last
    return accepted


@inner
def _follow(
    begin: int, end: int, tokens: NDArray[np.int64], nodes: Nodes, step: Step, following: NDArray[np.int64]
) -> int:
    """Note the token that was selected after each node: the selected tokens are a path below the root.

    Returns:
        How many of them were drafted. If they are no path of this draft, none, and nothing is known of its nodes.
    """
    at = begin
    for index in range(begin, end):
        following[index] = -1
        if step.nodes[index] <= 0:
            at = index  # the root, in the end
    for count in range(len(tokens)):
        following[at] = tokens[count]
        child = -1
        for other in range(at + 1, end):
            node = step.nodes[other]
            if nodes.parents[node] == step.nodes[at] and nodes.tokens[node] == tokens[count]:
                child = other
        if child < 0:
            if count + 1 < len(tokens):
                for index in range(begin, end):
                    following[index] = step.ids[index, 0] = -1
                return 0
            return count
        at = child
    return len(tokens)


@inner
def _compare(
    place: int,
    begin: int,
    end: int,
    samples: int,
    step: Step,
    heard: Heard,
    following: NDArray[np.int64],
    observes: bool,
) -> float:
    """Compare the selected tokens with what the model said before them; returns the share that this accounts for."""
    if observes:
        return 1.0
    is_listed = samples > 0 and step.ids.shape[1] > 1
    kept = _KEPT_SAMPLED if is_listed else _KEPT
    for at in range(begin, end):
        if following[at] < 0 or step.ids[at, 0] < 0:
            continue
        agreed, expected = 1.0 if step.ids[at, 0] == following[at] else 0.0, 1.0
        if is_listed:
            agreed = expected = 0.0
            for rank in range(step.ids.shape[1]):
                likely = float(step.probabilities[at, rank])
                expected += likely * likely
                agreed += likely if step.ids[at, rank] == following[at] else 0.0
        heard.agreed[place] = kept * heard.agreed[place] + agreed
        heard.expected[place] = kept * heard.expected[place] + expected
    share = min(heard.agreed[place] / heard.expected[place], 1.0)
    heard.shares[place] = 1.0 if samples > 0 and share > _SURE else share
    return float(heard.shares[place])


@inner
def _believe(begin: int, end: int, share: float, step: Step, following: NDArray[np.int64], observes: bool) -> None:
    """Where predictions account for too little of what is selected, write that over them; then nothing is known about
    nodes that are not on the path."""
    if share >= UNTRUSTED and not observes:
        return
    for at in range(begin, end):
        for rank in range(step.ids.shape[1]):
            step.ids[at, rank], step.probabilities[at, rank] = -1, 0.0
        step.ids[at, 0], step.probabilities[at, 0] = following[at], 1.0


@inner
def _list_siblings(
    place: int,
    begin: int,
    end: int,
    nodes: Nodes,
    step: Step,
    heard: Heard,
    following: NDArray[np.int64],
    lessons: Lessons,
) -> None:
    """Keep what the model says after the nodes in whose place another token was selected last, each of them as likely
    as it was: it often says the same after the right one."""
    tokens, shares = lessons.tokens, lessons.shares
    before, count, total = begin, 0, 0.0
    for at in range(begin, end):
        before = at if following[at] >= 0 else before
    for at in range(before + 1, end):
        node = step.nodes[at]
        if nodes.parents[node] != step.nodes[before]:
            continue
        for rank in range(step.ids.shape[1]):
            if step.ids[at, rank] < 0:
                break
            share = nodes.probabilities[node] * float(step.probabilities[at, rank])
            found = 0
            while found < count and tokens[found] != step.ids[at, rank]:
                found += 1
            if found == len(tokens):
                continue
            if found == count:
                tokens[found], shares[found] = step.ids[at, rank], 0.0
                count += 1
            shares[found] += share
    for index in range(count):
        total += shares[index]
    heard.counts[place, 1] = min(count, MOST_LISTED)
    for rank in range(heard.counts[place, 1]):
        best = rank
        for other in range(rank + 1, count):
            best = other if shares[other] > shares[best] else best
        token, share = tokens[best], shares[best]
        for other in range(best, rank, -1):
            tokens[other], shares[other] = tokens[other - 1], shares[other - 1]
        tokens[rank], shares[rank] = token, share
        heard.siblings[place, rank], heard.likely[place, rank] = token, share / total


@inner
def _write(
    place: int,
    begin: int,
    end: int,
    is_text: bool,
    step: Step,
    clock: int,
    nodes: Nodes,
    texts: TextArrays,
    entries: Entries,
    writing: Writing,
    lessons: Lessons,
    following: NDArray[np.int64],
) -> None:
    """Write what follows those nodes of a row that are text now, or the others."""
    written = 0
    for at in range(begin, end):
        if (step.nodes[at] <= 0 or following[at] >= 0) == is_text and step.ids[at, 0] >= 0:
            if not is_text and written >= lessons.rejected:
                break
            written += 1
            context = lessons.context
            size = read_context(place, step.nodes[at], len(context), nodes, texts, context)
            write_entry(context, size, step.ids[at], step.probabilities[at], clock, entries, writing)


@inner
def _note_recent(
    place: int,
    begin: int,
    end: int,
    step: Step,
    heard: Heard,
    following: NDArray[np.int64],
    fresh: NDArray[np.int64],
) -> None:
    """Put the two likeliest tokens after each node before the recent predictions, those after what is text now last."""
    recent, count = heard.recent[place], 0
    for rank in range(min(step.ids.shape[1], 2)):
        for is_text in (False, True):
            for at in range(begin, end):
                if (step.nodes[at] <= 0 or following[at] >= 0) == is_text and step.ids[at, 0] >= 0:
                    token = step.ids[at, rank]
                    count = _add_recent(token, count, fresh) if token >= 0 and count < _LATEST else count
    for index in range(heard.counts[place, 0]):
        count = _add_recent(recent[index], count, fresh) if count < _LATEST else count
    for index in range(count):
        recent[index] = fresh[index]
    heard.counts[place, 0] = count


@inner
def _add_recent(token: int, count: int, recent: NDArray[np.int64]) -> int:
    """Add a token to the first `count`, unless it is one of them; returns how many there are now."""
    for index in range(count):
        if recent[index] == token:
            return count
    recent[count] = token
    return count + 1
