"""Which request each row of vLLM's batch is: it names none, so they are recognised by their texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled
from lookahead.drafting.auto.path_batch import PathBatch
from lookahead.drafting.auto.path_texts import TextArrays, is_begun_by

_COMPARED = 256
"""Last tokens by which a text is known to be still the one in its row; elsewhere texts are compared as a whole."""


class Rows(NamedTuple):
    """The rows of a batch, `[rows]` each.

    Attributes:
        places: The place of each text in the batch of paths; -1 where the step added nothing.
        begun: 1 where it is new there, else 0.
        verified: 1 where the step verified the draft made after the last step, else 0.
    """

    places: NDArray[np.int64]
    begun: NDArray[np.int64]
    verified: NDArray[np.int64]


class Requests:
    """Gives each request a place. One that was preempted and comes back finds its own; of those that are not there the
    latest are kept, as many as vLLM may have besides those that are.

    Args:
        batch: Their texts and paths.
        most: Most requests of a step: as many places as it has.

    Attributes:
        absent: Places of those that are not there, the latest last.
        have_left: Whether some that were in the step before are not in the last one.
    """

    def __init__(self, batch: PathBatch, most: int) -> None:
        self._batch = batch
        self._most = most
        self._free = list(range(most))[::-1]
        self._rows = np.empty(0, dtype=np.int64)  # the places of the last step
        self._recognise = TypedLoop(_recognise)
        self.absent: list[int] = []
        self.have_left = False

    def rows(self, tokens: NDArray[np.int32], lengths: NDArray[np.int64], added: NDArray[np.int64]) -> Rows:
        """Recognise the requests of a step.

        Args:
            tokens: The texts, `[at least rows, room]`.
            lengths: How long they are now, `[rows]`.
            added: How many of these tokens the step added, `[rows]`.
        """
        places, begun = np.full(len(added), -1, dtype=np.int64), np.zeros(len(added), dtype=np.int64)
        self._recognise(self._rows, tokens, lengths, added, self._batch.texts.arrays, places)
        verified = (places >= 0).astype(np.int64)
        self.have_left = False
        missing = np.flatnonzero((places < 0) & (added > 0)).tolist()
        if missing or len(self._rows) != len(places) or not verified.all():
            self._find(missing, places, verified, tokens, lengths - added)
            self._admit([row for row in missing if places[row] < 0], places, begun)
        self._rows = places
        return Rows(places, begun, verified)

    def _find(
        self,
        missing: list[int],
        places: NDArray[np.int64],
        verified: NDArray[np.int64],
        tokens: NDArray[np.int32],
        before: NDArray[np.int64],
    ) -> None:
        """Find requests that moved or come back; the longest text that a row goes on from is its own."""
        texts, present = self._batch.texts.arrays, {*places.tolist()}
        others = [place for place in (*self._rows.tolist(), *self.absent) if place >= 0 and place not in present]
        others.sort(key=lambda place: -(texts.lengths[place] + texts.dropped[place]))
        of_last_step = {*self._rows.tolist()}
        for row in missing:
            text = tokens[row, : before[row]]
            place = next((place for place in others if self._batch.is_before(place, text)), -1)
            if place >= 0:
                others.remove(place)
                places[row] = place
                verified[row] = place in of_last_step and texts.lengths[place] + texts.dropped[place] == before[row]
        present = {*places.tolist()}
        left = [place for place in self._rows.tolist() if place >= 0 and place not in present]
        self.absent = [*(place for place in self.absent if place not in present), *left]
        self.have_left = bool(left)

    def _admit(self, new: list[int], places: NDArray[np.int64], begun: NDArray[np.int64]) -> None:
        """Give new requests places, of those that are absent longest if there are no others."""
        present = int(np.count_nonzero(places >= 0)) + len(new)
        while len(self.absent) > max(self._most - present, 0):
            place = self.absent.pop(0)
            self._batch.texts.forget(place)
            self._free.append(place)
        for row in new:
            places[row], begun[row] = self._free.pop(), 1


@compiled
def _recognise(
    rows: NDArray[np.int64],
    tokens: NDArray[np.int32],
    lengths: NDArray[np.int64],
    added: NDArray[np.int64],
    texts: TextArrays,
    places: NDArray[np.int64],
) -> None:
    """Write to `places` those of the last step, `rows`, where nobody came or left: mostly that is all."""
    for row in range(min(len(rows), len(places))):
        place, before = rows[row], lengths[row] - added[row]
        if place < 0 or added[row] == 0 or texts.dropped[place] + texts.lengths[place] != before:
            continue
        if is_begun_by(place, tokens[row], _COMPARED, texts):
            places[row] = place
