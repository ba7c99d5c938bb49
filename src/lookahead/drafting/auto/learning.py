"""What a step teaches about the texts that it was for: one loop over all of them.

What the model said after each node goes to the n-gram memory, and what it thought of lately is kept to be tried. That
counts as far as its predictions are what is selected: not where processors or a grammar decide otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.ngrams import EVIDENCE_PRIOR, OLD_SHARE, Entries, Writing, write_entry
from lookahead.drafting.auto.sources import KEPT, MOST_LISTED, PRIOR, ListedArrays
from lookahead.drafting.auto.texts import TextArrays, append, read_context

UNTRUSTED = 0.35
"""Share of selected tokens among the likeliest below which predictions that are not on the path teach nothing."""

_EVIDENCE_KEPT = 0.995
"""What is left of the record of a kind of evidence after each step of a text."""

HEARD = np.dtype(
    [
        ("seen", np.float64),  # selected tokens lately
        ("agreed", np.float64),  # how many of them were among those that the model thought likely
        ("share", np.float64),  # the one over the other
        ("count", np.int64),  # of its recent predictions, see `BatchState`
        ("guessed", np.int64),  # of `guesses`
        ("guesses", np.int64, (MOST_LISTED,)),  # what it said after the likeliest token rejected in the root's place
        ("likely", np.float64, (MOST_LISTED,)),  # how likely these are
        ("recalled", np.int64),  # whether the memory has learned the text itself
    ]
)
"""What the model said lately about a text."""

SETTINGS = np.dtype(
    [
        ("chains", np.int64),  # whether a draft is one path: the likeliest token, and the likeliest after that
        ("explores", np.int64),  # whether recent predictions are tried after the root, where nothing better is left
        ("observes", np.int64),  # whether what was selected stands for what the model predicts, which is not known
    ]
)
"""How the texts of a batch are drafted for and learned from."""


class BatchState(NamedTuple):
    """What drafts come from.

    Attributes:
        entries: The n-gram memory.
        texts: The texts.
        heard: What the model said lately of each, `HEARD`s, `[places]`.
        recent: The end of its prompt and what the model predicted since, each token once, the latest first, `[places,
            nodes]`: no more can be tried.
        listed: What the sources of a text list.
        trees: The draft after each, `NODE`s, `[places, nodes]`.
        counts: How many nodes it has, `[places]`; -1 where none was looked for since the text went on.
        weights: Weigh what the memory and matches say; see `all_weights`.
        settings: A `SETTINGS`.
    """

    entries: Entries
    texts: TextArrays
    heard: NDArray[Any]
    recent: NDArray[np.int64]
    listed: ListedArrays
    trees: NDArray[Any]
    counts: NDArray[np.int64]
    weights: NDArray[np.float64]
    settings: Any


SHOWN = np.dtype(
    [
        ("place", np.int64),  # of the text; -1 where the step added nothing
        ("root", np.int64),  # how many nodes are tokens of the text before its last one
        ("nodes", np.int64),  # how many there are: these, the last one, which is the root, and the first of its draft
        ("added", np.int64),  # how many tokens the step added to the text
    ]
)
"""What a step showed of one text.

One without nodes is a text that goes on without predictions. One that adds no tokens has the text itself learned: its
nodes are the last tokens of the text, the root the very last.
"""


class Step(NamedTuple):
    """What a step showed.

    Attributes:
        rows: `SHOWN`s, `[rows]`.
        tokens: The tokens that were added, row after row.
        ids: The likeliest tokens after each node, row after row, likeliest first, `[nodes, listed]`; -1 where nothing
            was read. They are written over.
        probabilities: Their probabilities, likewise.
        selected: Gets the token that was selected after each node, -1 for those that are not of the text now,
            `[nodes]`. Where the text itself is learned it says so.
    """

    rows: NDArray[Any]
    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    selected: NDArray[np.int64]

    @classmethod
    def of_text(cls, place: int, tokens: NDArray[np.int64], selected: NDArray[np.int64]) -> Step:
        """The text in a place goes on with these tokens; if there are none, what was `selected` after each of its last
        ones is learned."""
        taught = len(selected)
        rows = np.array([(place, max(taught - 1, 0), taught, len(tokens))], dtype=SHOWN)
        ids, probabilities = np.full((taught, 1), -1, dtype=np.int64), np.zeros((taught, 1), dtype=np.float32)
        return cls(rows, tokens, ids, probabilities, selected)


@compiled
def learn(step: Step, clock: int, state: BatchState, writing: Writing, fresh: NDArray[np.int64]) -> tuple[int, int]:
    """Learn from a step, and let the texts go on.

    Args:
        step: What it showed.
        clock: Dates what is written to the memory.
        state: Gets what was learned. No draft counts any more.
        writing: How entries are written.
        fresh: Room for recent predictions while they are put in order, `[nodes]`.

    Returns:
        How many drafted tokens were accepted, and how many texts the memory has yet to learn themselves.
    """
    entries, texts, heard, recent, listed, trees, counts, _, settings = state
    accepted = lost = begin = first = FIRST
    for row in range(len(step.rows)):
        shown = step.rows[row]
        place, root, end, last = shown["place"], shown["root"], begin + shown["nodes"], first + shown["added"]
        if place >= 0:
            nodes, of_text, tokens = trees[place], heard[place], step.tokens[first:last]
            said, likely, selected = step.ids[begin:end], step.probabilities[begin:end], step.selected[begin:end]
            if last > first and end > begin:
                accepted += _follow(root, tokens, nodes, said, selected)
                _weigh_evidence(root, nodes, selected, entries.evidence)
                if counts[place] >= 0:
                    _weigh_sources(tokens, listed)
                if not settings["observes"]:
                    _compare(said, selected, of_text)
            if last == first or settings["observes"] or of_text["share"] < UNTRUSTED:
                _believe(said, likely, selected, 1.0 if settings["observes"] else 1 - OLD_SHARE)
            _keep_guesses(root, nodes, said, likely, selected, of_text)
            if settings["explores"] and last > first:
                of_text["count"] = _note_recent(root, said, selected, recent[place], of_text["count"], fresh)
            for is_text in (False, True):  # what is text now comes last, so that it counts
                for at in range(len(selected)):
                    if said[at, 0] >= 0 and is_text == (at <= root or selected[at] >= 0):
                        size = read_context(place, at - root, nodes, texts, writing.context)
                        write_entry(writing.context[:size], said[at], likely[at], clock, entries, writing)
            append(place, tokens, texts)
            counts[place] = -1
            lost += of_text["share"] < UNTRUSTED and of_text["recalled"] == 0
        begin, first = end, last
    return accepted, lost


@inner
def _follow(
    root: int, tokens: NDArray[np.int64], nodes: NDArray[Any], said: NDArray[np.int64], selected: NDArray[np.int64]
) -> int:
    """Note the token that was selected after each node: the selected tokens are a path below the root.

    Returns:
        How many of them were drafted. If they are no path of this draft, none, and nothing is known of its nodes.
    """
    at, count = root, FIRST
    for index in range(len(selected)):
        selected[index] = -1
    for token in tokens:
        if at < 0:  # the one before was not drafted
            for index in range(len(selected)):
                selected[index] = said[index, 0] = -1
            return 0
        selected[at] = token
        before, at = at, -1
        for other in range(before + 1, len(selected)):
            node = nodes[other - root]
            if node["parent"] == before - root and node["token"] == token:
                at = other
                count += 1
                break
    return count


@inner
def _weigh_evidence(root: int, nodes: NDArray[Any], selected: NDArray[np.int64], evidence: NDArray[np.float64]) -> None:
    """Note how often drafted tokens came true, by kind of evidence; of those before, a little is forgotten."""
    for records in evidence:
        for record in records:
            for count in range(2):
                record[count] -= (1 - _EVIDENCE_KEPT) * (record[count] - EVIDENCE_PRIOR)
    for at in range(root + 1, len(selected)):
        node = nodes[at - root]
        before = selected[root + node["parent"]]
        if before >= 0 and node["weighed"]:
            record = evidence[1 + node["match"], node["order"]]
            record[0] += before == node["token"]
            corrected = max(node["probability"] / nodes[node["parent"]]["probability"], node["listed"])
            record[1] += min(corrected, 1.0) * record[1] / record[0]


@inner
def _weigh_sources(tokens: NDArray[np.int64], listed: ListedArrays) -> None:
    """Follow the selected tokens along the paths of each source, and note how many of them it listed."""
    for source in range(len(listed.record)):
        at, accepted, expected = source, 0.0, 0.0
        for token in tokens:
            before, at = at, FIRST - 1
            for number in range(before + 1, len(listed.tokens) if before >= 0 else 0):
                one = listed.tokens[number]
                if one["parent"] == before:
                    expected += one["probability"]
                    if one["token"] == token:
                        accepted += 1.0
                        at = number
        record = listed.record[source]
        if expected > 0:
            record[0] = PRIOR + KEPT * (record[0] - PRIOR) + accepted
            record[1] = PRIOR + KEPT * (record[1] - PRIOR) + expected


@inner
def _compare(said: NDArray[np.int64], selected: NDArray[np.int64], of_text: Any) -> None:
    """Compare the selected tokens with those that the model thought likely."""
    seen, agreed = of_text["seen"], of_text["agreed"]
    for at in range(len(selected)):
        token, listed = selected[at], said[at]
        if token >= 0 and listed[0] >= 0:
            seen, agreed = KEPT * seen + 1.0, KEPT * agreed
            for other in listed:
                if other == token:
                    agreed += 1.0
                    break
    of_text["seen"], of_text["agreed"], of_text["share"] = seen, agreed, agreed / seen


@inner
def _believe(said: NDArray[np.int64], likely: NDArray[np.float32], selected: NDArray[np.int64], share: float) -> None:
    """Write what was selected over predictions that account for too little of it, or are not known; then nothing is
    known about nodes that are not on the path."""
    for at in range(len(selected)):
        said[at, 0], likely[at, 0] = selected[at], share
        if said.shape[1] > 1:
            said[at, 1] = -1


@inner
def _keep_guesses(
    root: int,
    nodes: NDArray[Any],
    said: NDArray[np.int64],
    likely: NDArray[np.float32],
    selected: NDArray[np.int64],
    of_text: Any,
) -> None:
    """Keep what the model says after the likeliest of the nodes in whose place another token was selected last. Often
    it says the same after that one."""
    last, of_text["guessed"] = root, 0
    for at in range(root, len(selected)):
        last = at if selected[at] >= 0 else last
    for at in range(last + 1, len(selected)):
        if nodes[at - root]["parent"] == last - root and said[at, 0] >= 0:
            for rank in range(min(said.shape[1], MOST_LISTED)):
                if said[at, rank] < 0:
                    break
                of_text["guesses"][rank], of_text["likely"][rank] = said[at, rank], likely[at, rank]
                of_text["guessed"] = rank + 1
            break


@inner
def _note_recent(
    root: int,
    said: NDArray[np.int64],
    selected: NDArray[np.int64],
    recent: NDArray[np.int64],
    before: int,
    fresh: NDArray[np.int64],
) -> int:
    """Put the two likeliest tokens after each node before the recent predictions, those after what is text now last;
    there were `before` of them. Returns how many there are."""
    count = FIRST
    for rank in range(min(said.shape[1], 2)):
        for is_text in (False, True):
            for at in range(len(selected)):
                if (at <= root or selected[at] >= 0) == is_text and said[at, rank] >= 0:
                    count = _add_recent(said[at, rank], count, fresh)
    for index in range(before):
        count = _add_recent(recent[index], count, fresh)
    for index in range(count):
        recent[index] = fresh[index]
    return count


@inner
def _add_recent(token: int, count: int, recent: NDArray[np.int64]) -> int:
    """Add a token to the first `count`, unless it is one of them or there are enough; returns how many there are."""
    if count == len(recent):
        return count
    for index in range(count):
        if recent[index] == token:
            return count
    recent[count] = token
    return count + 1
