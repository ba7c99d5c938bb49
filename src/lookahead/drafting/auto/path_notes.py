"""What steps showed of several texts, written to the n-gram memory at once: a call takes longer than a text does."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, loop_arrays, loop_tuple
from lookahead.drafting.auto.draft_memory import DraftMemory

_ROOM = 256
"""Rows that there is room for at first."""


class _Notes(NamedTuple):
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
    """

    def __init__(self, orders: int) -> None:
        self._orders = orders
        self._notes: dict[int, _Notes] = {}  # by how many tokens are listed in each row
        self._run = TypedLoop(_note_path)

    def add(
        self,
        end: NDArray[np.int64],
        draft: NDArray[np.int64],
        known: int,
        ids: NDArray[np.int64],
        shares: NDArray[np.float32],
    ) -> None:
        """Note a step of one text.

        Args:
            end: The last tokens of the text.
            draft: The tokens after it that the model read, `[rows - 1]`.
            known: How many of the rows stand after what is text now; the others follow a token that was rejected.
            ids: The likeliest tokens after each, likeliest first, `[rows, listed]`.
            shares: Their probabilities, likewise.
        """
        notes = loop_tuple(self._with_room(*ids.shape))
        self._run(known, *loop_arrays(end, draft, np.ascontiguousarray(ids), np.ascontiguousarray(shares)), notes)

    def _with_room(self, rows: int, listed: int) -> _Notes:
        notes = self._notes.get(listed)
        if notes is None or notes.counts[0] + rows > len(notes.known):
            room = max(_ROOM, rows) if notes is None else 2 * len(notes.known) + rows
            contexts, ids = (np.empty((room, columns), dtype=np.int64) for columns in (self._orders, listed))
            known, counts = np.empty(room, dtype=np.int64), np.zeros(1, dtype=np.int64)
            new = _Notes(contexts, ids, np.empty((room, listed), dtype=np.float32), known, counts)
            if notes is not None:
                before: tuple[NDArray[Any], ...] = notes
                after: tuple[NDArray[Any], ...] = new
                for old, array in zip(before, after, strict=True):
                    array[: len(old)] = old
            self._notes[listed] = notes = new
        return notes

    def write(self, memory: DraftMemory) -> None:
        """Write all to the memory; what follows real text last, so that it counts."""
        with memory.lock:
            for notes in self._notes.values():
                rows = int(notes.counts[0])
                if rows:
                    order = np.argsort(notes.known[:rows], kind="stable")
                    memory.ngrams.insert(notes.contexts[order], notes.ids[order], notes.shares[order])
                    notes.counts[0] = 0


@compiled
def _note_path(
    known: int,
    end: NDArray[np.int64],
    draft: NDArray[np.int64],
    ids: NDArray[np.int64],
    shares: NDArray[np.float32],
    notes: _Notes,
) -> None:
    """`PathNotes.add`, where there is room."""
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
