"""What a step showed of several texts, written to the n-gram memory at once: a call takes longer than a text does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner
from lookahead.drafting.auto.ngram_memory import NGramMemory

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


@inner
def note_path(
    known: int,
    end: NDArray[np.int64],
    draft: NDArray[np.int64],
    ids: NDArray[np.int64],
    shares: NDArray[np.float32],
    notes: Notes,
) -> None:
    """Note a step of one text.

    Args:
        known: How many of the rows stand after what is text now; the others follow a token that was rejected.
        end: The text before.
        draft: The tokens after it that the model read, `[at least rows - 1]`.
        ids: The likeliest tokens after each, likeliest first, `[rows, listed]`.
        shares: Their probabilities, likewise.
        notes: Get the rows.
    """
    for row in range(ids.shape[0]):
        to = notes.counts[0] + row
        for column in range(notes.contexts.shape[1]):
            at = row - 1 - column  # in the draft; below 0, from the end of the text
            token = -1
            if at >= 0:
                token = draft[at]
            elif len(end) + at >= 0:
                token = end[len(end) + at]
            notes.contexts[to, column] = token
        for rank in range(ids.shape[1]):
            notes.ids[to, rank] = ids[row, rank]
            notes.shares[to, rank] = shares[row, rank]
        notes.known[to] = 1 if row < known else 0
    notes.counts[0] += ids.shape[0]
