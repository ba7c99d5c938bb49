"""What a step teaches about the paths of a batch, in one loop: with many texts, calls take longer than lessons."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.ngram_entries import LEAST_PROBABILITY
from lookahead.drafting.auto.ngram_memory import NGramMemory, write_contexts
from lookahead.drafting.auto.path_arrays import PathArrays, PathStates, listed_of, start_path
from lookahead.drafting.auto.proposals import MOST_LISTED
from lookahead.drafting.auto.sources import ListedArrays
from lookahead.drafting.auto.texts import TextArrays, begin_text, follow_text
from lookahead.drafting.auto.trust import KEPT, mix_in

_LEAST_ROOM = 256


class Notes(NamedTuple):
    """Rows with as many listed tokens each: contexts as `NGramMemory` takes them, what the model said after them, and
    whether they are text now; and how many there are, `[1]`."""

    contexts: NDArray[np.int64]
    ids: NDArray[np.int64]
    shares: NDArray[np.float32]
    known: NDArray[np.int64]
    counts: NDArray[np.int64]


class PathNotes:
    """Collects what the model said after texts and their drafts.

    Args:
        orders: Longest context of the memory that it is written to.
        listed: How many tokens each row lists.
    """

    def __init__(self, orders: int, listed: int) -> None:
        self._sizes = orders, listed
        self.arrays = self._allocate(_LEAST_ROOM)

    def _allocate(self, room: int) -> Notes:
        contexts, ids = (np.empty((room, columns), dtype=np.int64) for columns in self._sizes)
        return Notes(
            contexts,
            ids,
            np.empty(ids.shape, dtype=np.float32),
            np.empty(room, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
        )

    def make_room(self, rows: int) -> None:
        """Make room for so many rows, where there are none yet."""
        if rows > len(self.arrays.known):
            self.arrays = self._allocate(2 * rows)

    def write(self, ngrams: NGramMemory) -> None:
        """Write all to a memory; what follows real text last, so that it counts."""
        notes = self.arrays
        rows = int(notes.counts[0])
        if rows:
            order = np.argsort(notes.known[:rows], kind="stable")
            ngrams.insert(notes.contexts, notes.ids, notes.shares, order)
            notes.counts[0] = 0


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
    _note_path(len(selected), end, draft, paths.nodes.parents[place], ids, shares, taught.notes)


@inner
def _note_path(
    known: int,
    end: NDArray[np.int64],
    draft: NDArray[np.int64],
    line: NDArray[np.int64],
    ids: NDArray[np.int64],
    shares: NDArray[np.float32],
    notes: Notes,
) -> None:
    """Note what the model said after a text and the first tokens of its draft.

    Args:
        known: How many of the rows stand after what is text now; the others follow a token that was rejected.
        end: The text before.
        draft: The tokens after it that the model read, `[at least rows - 1]`.
        line: -1, 0, 1, ...: the parents of a chain.
        ids: The likeliest tokens after each, likeliest first, `[rows, listed]`.
        shares: Their probabilities, likewise.
        notes: Get the rows.
    """
    begin, rows = notes.counts[0], len(ids)
    notes.counts[0] = begin + rows
    write_contexts(end, draft, line, line[:rows], notes.contexts[begin : begin + rows])
    for row in range(rows):
        notes.known[begin + row] = 1 if row < known else 0
        for rank in range(ids.shape[1]):
            notes.ids[begin + row, rank] = ids[row, rank]
            notes.shares[begin + row, rank] = shares[row, rank]


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
