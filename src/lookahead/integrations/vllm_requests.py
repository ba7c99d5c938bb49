"""Recognition of the requests in vLLM's batch by their texts, since vLLM does not pass their ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.texts import LONGEST, TextArrays


class Rows(NamedTuple):
    """Requests in the rows of a batch, arrays `[rows]` each.

    Attributes:
        places: Slot of each text in the batch of drafts; -1 if the step added no token.
        begun: 1 for a request that is new in its slot, else 0.
        verified: 1 if the step verified the draft made after the last step, else 0.
        counts: Number of sampled positions, the verified tokens plus one.
    """

    places: NDArray[np.int64]
    begun: NDArray[np.int64]
    verified: NDArray[np.int64]
    counts: NDArray[np.int64]


class Requests:
    """Assign a slot to each request. A new request gets the slot that was unused for the longest time.

    A preempted request that returns gets its old slot back, unless a new request has taken it.

    Args:
        batch: Texts and drafts of the requests, with a slot for each request of a step.

    Attributes:
        absent: Unused slots, the most recently freed last.
        have_left: Whether a request of the step before is missing in the last one.
    """

    def __init__(self, batch: DraftBatch) -> None:
        self._batch = batch
        self._rows = np.empty(0, dtype=np.int64)  # the slots of the last step
        self._recognise = TypedLoop(_recognise)
        self.absent = list(range(len(batch.counts)))
        self.have_left = False
        nothing = np.zeros(1, dtype=np.int64)
        self.rows(np.zeros((1, 1), dtype=np.int32), nothing, nothing)  # so that no step has to wait for compilation

    def rows(self, tokens: NDArray[np.int32], lengths: NDArray[np.int64], added: NDArray[np.int64]) -> Rows:
        """Recognise the requests of a step.

        Args:
            tokens: Token ids of the texts, `[at least rows, at least the longest text]`.
            lengths: Number of tokens of each text, new ones included, `[rows]`.
            added: Number of tokens that the step added, `[rows]`.
        """
        rows = Rows(*np.zeros((len(Rows._fields), len(added)), dtype=np.int64))
        batch = self._batch
        changed = self._recognise(self._rows, tokens, lengths, added, batch.texts, batch.counts, rows)
        self.have_left = False
        if changed:
            self._find(rows, tokens, lengths - added, added)
            for row in np.flatnonzero((rows.places < 0) & (added > 0)).tolist():  # new
                rows.places[row], rows.begun[row] = self.absent.pop(0), 1
        self._rows = rows.places
        return rows

    def _find(self, rows: Rows, tokens: NDArray[np.int32], before: NDArray[np.int64], added: NDArray[np.int64]) -> None:
        """Find requests that moved or returned: a row belongs to the longest known text that it begins with."""
        texts = self._batch.texts
        drafted = self._batch.counts
        present = {*rows.places.tolist()}
        of_last_step = {*self._rows.tolist()}
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
def _is_begun_by(place: int, tokens: NDArray[np.int32], compared: int, texts: TextArrays) -> bool:
    """Whether `tokens` begin with the text in slot `place`; only its last `compared` tokens are read."""
    length = texts.lengths[place]
    dropped = texts.dropped[place]
    if length == 0 or dropped + length > len(tokens):
        return False
    at = max(length - compared, 0)
    while at < length and texts.tokens[place, at] == tokens[dropped + at]:
        at += 1
    return bool(at == length)


@compiled
def _precedes(place: int, tokens: NDArray[np.int32], texts: TextArrays) -> bool:
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
    """Find requests in the same rows as in the step before (`before`); return whether any joined, left or moved."""
    changed = len(before) != len(added)
    for row in range(len(added)):
        place = before[row] if row < len(before) and added[row] > 0 else -1
        length = lengths[row] - added[row]
        if place >= 0 and texts.dropped[place] + texts.lengths[place] == length:
            # The last tokens that a draft depends on; to find moved texts all tokens are compared.
            place = place if _is_begun_by(place, tokens[row], LONGEST, texts) else -1
        else:
            place = -1
        rows.places[row] = place
        rows.verified[row] = 1 if place >= 0 else 0
        rows.counts[row] = 1 + max(drafted[place], 0) if place >= 0 else 1
        changed = changed or place < 0
    return bool(changed)
