"""Which request each row of vLLM's batch is: it names none, so they are recognised by their texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.texts import TextArrays

_COMPARED = 256
"""Last tokens by which a text is known to be still the one in its row; elsewhere texts are compared as a whole."""


class Rows(NamedTuple):
    """The rows of a batch, `[rows]` each.

    Attributes:
        places: The place of each text in the batch of drafts; -1 where the step added nothing.
        begun: 1 where it is new there, else 0.
        verified: 1 where the step verified the draft made after the last step, else 0.
        counts: How many positions the step sampled from: one more than it verified.
    """

    places: NDArray[np.int64]
    begun: NDArray[np.int64]
    verified: NDArray[np.int64]
    counts: NDArray[np.int64]


class Requests:
    """Gives each request a place. One that was preempted and comes back finds its own, unless a new one has taken it:
    these take those that are absent longest.

    Args:
        batch: Their texts and drafts. It has a place for each request of a step.

    Attributes:
        absent: Places of no request that is there, the latest to leave last.
        have_left: Whether some that were in the step before are not in the last one.
    """

    def __init__(self, batch: DraftBatch) -> None:
        self._batch = batch
        self._rows = np.empty(0, dtype=np.int64)  # the places of the last step
        self._recognise = TypedLoop(_recognise)
        self.absent = list(range(len(batch.state.counts)))
        self.have_left = False
        nothing = np.zeros(1, dtype=np.int64)
        self.rows(np.zeros((1, 1), dtype=np.int32), nothing, nothing)  # so that no step has to wait for compilation

    def rows(self, tokens: NDArray[np.int32], lengths: NDArray[np.int64], added: NDArray[np.int64]) -> Rows:
        """Recognise the requests of a step.

        Args:
            tokens: The texts, `[at least rows, room]`.
            lengths: How long they are now, `[rows]`.
            added: How many of these tokens the step added, `[rows]`.
        """
        rows = Rows(*np.zeros((len(Rows._fields), len(added)), dtype=np.int64))
        batch = self._batch
        changed = self._recognise(self._rows, tokens, lengths, added, batch.state.texts, batch.state.counts, rows)
        self.have_left = False
        if changed:
            self._find(rows, tokens, lengths - added, added)
            for row in np.flatnonzero((rows.places < 0) & (added > 0)).tolist():  # new
                rows.places[row], rows.begun[row] = self.absent.pop(0), 1
        self._rows = rows.places
        return rows

    def _find(self, rows: Rows, tokens: NDArray[np.int32], before: NDArray[np.int64], added: NDArray[np.int64]) -> None:
        """Find requests that moved or come back; the longest text that a row goes on from is its own."""
        texts, drafted = self._batch.state.texts, self._batch.state.counts
        present, of_last_step = {*rows.places.tolist()}, {*self._rows.tolist()}
        gone = [place for place in (*self._rows.tolist(), *self.absent) if place >= 0 and place not in present]
        gone.sort(key=lambda place: -(texts.lengths[place] + texts.dropped[place]))
        for row in np.flatnonzero((rows.places < 0) & (added > 0)).tolist():
            text = tokens[row, : before[row]]
            place = next((place for place in gone if _precedes(place, text, texts)), -1)
            if place >= 0:
                gone.remove(place)
                rows.places[row] = place
                if place in of_last_step and texts.lengths[place] + texts.dropped[place] == len(text):
                    rows.verified[row], rows.counts[row] = 1, 1 + max(drafted[place], 0)
        present = {*rows.places.tolist()}
        left = [place for place in self._rows.tolist() if place >= 0 and place not in present]
        self.absent = [*(place for place in self.absent if place not in present), *left]
        self.have_left = bool(left)


@inner
def _is_begun_by(place: int, tokens: NDArray[np.int32], most: int, texts: TextArrays) -> bool:
    """Whether `tokens` begin with the text in a place, as far as its last `most` tokens tell."""
    length, dropped = texts.lengths[place], texts.dropped[place]
    if length == 0 or dropped + length > len(tokens):
        return False
    at = max(length - most, 0)
    while at < length and texts.tokens[place, at] == tokens[dropped + at]:
        at += 1
    return bool(at == length)


@compiled
def _precedes(place: int, tokens: NDArray[np.int32], texts: TextArrays) -> bool:
    """Whether the text in a place is what `tokens` begin with."""
    return bool(_is_begun_by(place, tokens, len(tokens), texts))


@compiled
def _recognise(
    before: NDArray[np.int64],
    tokens: NDArray[np.int32],
    lengths: NDArray[np.int64],
    added: NDArray[np.int64],
    texts: TextArrays,
    drafted: NDArray[np.int64],
    rows: Rows,
) -> bool:
    """Find requests where they were in the step before, `before`; returns whether any came, left or moved."""
    changed = len(before) != len(added)
    for row in range(len(added)):
        place = before[row] if row < len(before) and added[row] > 0 else -1
        length = lengths[row] - added[row]
        if place >= 0 and texts.dropped[place] + texts.lengths[place] == length:
            place = place if _is_begun_by(place, tokens[row], _COMPARED, texts) else -1
        else:
            place = -1
        rows.places[row] = place
        rows.verified[row] = 1 if place >= 0 else 0
        rows.counts[row] = 1 + max(drafted[place], 0) if place >= 0 else 1
        changed = changed or place < 0
    return bool(changed)
