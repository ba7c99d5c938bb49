"""What a step teaches about the paths of a batch, in one loop: with many texts, calls take longer than lessons."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.listed_paths import ListedArrays
from lookahead.drafting.auto.ngram_entries import LEAST_PROBABILITY
from lookahead.drafting.auto.path_arrays import PathArrays, PathStates, listed_of, start_path
from lookahead.drafting.auto.path_notes import Notes, note_path
from lookahead.drafting.auto.proposals import MOST_LISTED
from lookahead.drafting.auto.texts import TextArrays, begin_text, follow_text
from lookahead.drafting.auto.trust import KEPT, mix_in


class VerifiedPaths(NamedTuple):
    """What a step of the engine showed, a row for each text.

    Attributes:
        places: The place of each text, `[rows]`; -1 where the step added nothing.
        begun: 1 where the text is new in its place, else 0, `[rows]`.
        verified: 1 where the step verified the draft that was made for it last, else 0, `[rows]`.
        counts: How many predictions belong to it: one more than the tokens of that draft, if it was verified, `[rows]`.
        tokens: The texts, `[at least rows, room]`.
        lengths: How long they are now, `[at least rows]`.
        added: How many of these tokens the step added: the accepted part of the draft, and one more, `[rows]`.
        top_ids: The likeliest tokens after the text as it was and after each token of its draft, row after row, the
            likeliest first, `[sum of counts, listed]`; `[0, listed]` where nothing is known of them.
        top_probabilities: Their probabilities, likewise.
    """

    places: NDArray[np.int64]
    begun: NDArray[np.int64]
    verified: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    added: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_probabilities: NDArray[np.float32]


class Taught(NamedTuple):
    """What learns, and room for what is worked out of one path.

    Attributes:
        rejected: Of so many tokens that were rejected, what the model says after them is learned.
        notes: Get what the model said.
        reads: Whether steps tell that. Else what was selected stands for it.
        own_ids, own_shares: Room for the selected tokens as predictions, `[1 + longest, 1]`.
    """

    rejected: int
    notes: Notes
    reads: bool
    own_ids: NDArray[np.int64]
    own_shares: NDArray[np.float32]


def allocate_lessons(longest: int, notes: Notes, rejected: int, reads: bool) -> Taught:
    """Room for what paths of up to `longest` tokens teach."""
    ids, shares = np.zeros((longest + 1, 1), dtype=np.int64), np.zeros((longest + 1, 1), dtype=np.float32)
    return Taught(rejected, notes, reads, ids, shares)


@compiled
def learn_paths(step: VerifiedPaths, texts: TextArrays, paths: PathArrays, taught: Taught) -> int:
    """Let the texts go on, and learn from each of them; returns how many drafted tokens were accepted."""
    accepted = begin = 0
    is_told = not taught.reads or len(step.top_ids) > 0
    for row in range(len(step.places)):
        place = step.places[row]
        told = begin
        begin += step.counts[row]
        if place < 0:
            continue
        tokens, length = step.tokens[row], step.lengths[row]
        before = length - step.added[row]
        if step.begun[row]:
            begin_text(place, tokens, before, texts)
            start_path(place, paths)
        if not step.verified[row]:
            follow_text(place, tokens, before, texts)
            paths.states.drafted[place] = -1
        follow_text(place, tokens, length, texts)
        if _is_of_draft(place, step.added[row], texts, paths):
            accepted += step.added[row] - 1
            if is_told:
                _learn(place, row, told, step, texts, paths, taught)
        paths.states.drafted[place], paths.states.promised[place] = -1, 0.0
    return accepted


@inner
def _is_of_draft(place: int, added: int, texts: TextArrays, paths: PathArrays) -> bool:
    """Whether the last tokens of a text, but for the very last one, are the first ones of its draft."""
    if added - 1 > max(paths.states.drafted[place], 0):
        return False
    begin, first = texts.lengths[place] - added, paths.states.roots[place] + 1
    for index in range(added - 1):
        if texts.tokens[place, begin + index] != paths.nodes.tokens[place, first + index]:
            return False
    return True


@inner
def _learn(
    place: int, row: int, told: int, step: VerifiedPaths, texts: TextArrays, paths: PathArrays, taught: Taught
) -> None:
    """Learn from one text, which has gone on; its predictions are those from `told` on."""
    states, begin = paths.states, texts.lengths[place] - step.added[row]
    selected, end = texts.tokens[place, begin : texts.lengths[place]], texts.tokens[place, :begin]
    drafted = max(states.drafted[place], 0)
    ids, shares = taught.own_ids[: len(selected)], taught.own_shares[: len(selected)]
    if taught.reads:
        rows = slice(told, told + min(len(selected) + taught.rejected, 1 + drafted))
        ids, shares = step.top_ids[rows], step.top_probabilities[rows]
    else:
        for index in range(len(selected)):
            ids[index, 0], shares[index, 0] = selected[index], 1.0
    trust = _trust(place, selected, ids, states)
    if trust < 1:
        ids, shares = ids[: len(selected)], shares[: len(selected)]
        for index in range(len(selected)):
            mix_in(selected[index], ids[index], shares[index], trust)
    if states.drafted[place] >= 0 and len(selected) < len(ids):
        _list_followers(ids[len(selected)], shares[len(selected)], listed_of(place, paths))
    root = states.roots[place]
    draft = paths.nodes.tokens[place, root + 1 : root + 1 + drafted]
    note_path(len(selected), end, draft, ids, shares, taught.notes)


@inner
def _trust(place: int, selected: NDArray[np.int64], ids: NDArray[np.int64], states: PathStates) -> float:
    """The share of selected tokens that were the likeliest."""
    agreed, compared = states.agreed[place], states.compared[place]
    for index in range(len(selected)):
        agreed = KEPT * agreed + (1.0 if selected[index] == ids[index, 0] else 0.0)
        compared = KEPT * compared + 1
    states.agreed[place], states.compared[place] = agreed, compared
    return float(min(agreed / compared, 1.0))


@inner
def _list_followers(ids: NDArray[np.int64], shares: NDArray[np.float32], listed: ListedArrays) -> None:
    """List tokens that are predicted, so that their probabilities sum to one."""
    count = 0
    total = 0.0
    while count < min(len(ids), MOST_LISTED) and ids[count] >= 0:
        total += max(float(shares[count]), LEAST_PROBABILITY)
        count += 1
    for rank in range(count):
        listed.tokens[1 + rank] = ids[rank]
        listed.logs[1 + rank] = log(max(float(shares[rank]), LEAST_PROBABILITY) / total)
        listed.children[1 + rank] = -1
        listed.siblings[1 + rank] = 2 + rank if rank + 1 < count else -1
    listed.children[0] = 1 if count > 0 else -1
