"""What steps showed of several texts, written to the n-gram memory at once: a call takes longer than a text does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.draft_memory import DraftMemory


@dataclass(frozen=True)
class _Note:
    """Of one text: its last tokens and the draft after them, from how many rows on tokens were not selected, and what
    the model said."""

    path: NDArray[np.int64]
    known: int
    ids: NDArray[np.int64]
    shares: NDArray[np.float32]


class PathNotes:
    """Collects what the model said after texts and their drafts."""

    def __init__(self) -> None:
        self._notes: dict[int, list[_Note]] = {}  # by how many tokens are listed in each row

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
        self._notes.setdefault(ids.shape[1], []).append(_Note(np.concatenate([end, draft]), known, ids, shares))

    def write(self, memory: DraftMemory) -> None:
        """Write all to the memory; what follows real text last, so that it counts."""
        if not self._notes:
            return
        with memory.lock:
            orders = memory.ngrams.orders
            for notes in self._notes.values():
                ids = np.concatenate([note.ids for note in notes])
                shares = np.concatenate([note.shares for note in notes])
                contexts, selected = _contexts(notes, orders)
                order = np.argsort(selected, kind="stable")
                memory.ngrams.insert(contexts[order], ids[order], shares[order])
        self._notes = {}


def _contexts(notes: list[_Note], orders: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The last tokens before each row of all notes, the very last in column 0, `[rows, orders]`; and whether a row
    follows real text."""
    before = np.full(orders, -1, dtype=np.int64)
    tokens = np.concatenate([part for note in notes for part in (before, note.path)])
    counts = np.array([len(note.ids) for note in notes])
    ends = np.cumsum([orders + len(note.path) for note in notes])
    firsts = np.cumsum(counts) - counts  # of each note
    own = np.arange(counts.sum()) - np.repeat(firsts, counts)  # the row within its note
    last = np.repeat(ends - counts, counts) + own
    contexts = tokens[last[:, None] - np.arange(orders)]
    return contexts, own < np.repeat([note.known for note in notes], counts)
