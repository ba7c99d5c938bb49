"""Places for texts that share a memory: one call drafts after all of them, and one learns from all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import (
    HEARD,
    SETTINGS,
    UNTRUSTED,
    Known,
    Step,
    allocate_desk,
    go_on,
    learn,
)
from lookahead.drafting.auto.search import NODE, Room, Wanted, find
from lookahead.drafting.auto.sources import MOST_LISTED, PRIOR, TokenPaths, allocate_listed, with_paths
from lookahead.drafting.auto.texts import BUCKETS, LONGEST, OCCURRENCE, SEARCHED, allocate_texts, with_room


class DraftBatch:
    """Texts, and the drafts after them.

    Args:
        memory: What is known about the model.
        nodes: Most nodes of a draft, the root not counted.
        chains: Whether drafts are single paths, else trees.
        explores: Whether nodes of a tree that are left try recent predictions, where these are known.
        sources: How many sources list paths. If there are any, the batch has one place.
        places: How many texts there is room for at first.
        reach: Tokens of each text that are searched, at least.

    Attributes:
        memory: See above.
        reads: Whether steps have to tell what the model predicts; else what was selected stands for it.
        texts: The text in each place.
        nodes: The draft after each, `NODE`s, `[places, nodes]`.
        counts: How many nodes it has, `[places]`; -1 where none was looked for since the text went on.
        heard: What the model said about each, `HEARD`s, `[places]`.
        listed: What the sources of the text list.
        room: That of the last search.
    """

    def __init__(
        self,
        memory: DraftMemory,
        nodes: int,
        chains: bool = False,
        explores: bool = False,
        sources: int = 0,
        places: int = 1,
        reach: int = 2 * BUCKETS,
    ) -> None:
        self.memory = memory
        with memory.lock:
            ngrams, self._weights = memory.ngrams, memory.weights
        self.reads = not ngrams.observed
        size, at_a_node = nodes + 1, ngrams.orders * ngrams.top_k + SEARCHED + (1 + sources) * MOST_LISTED
        self.texts, self.nodes = allocate_texts(places, 1, reach), np.zeros((places, size), dtype=NODE)
        self.room = Room(
            np.zeros(size * at_a_node + size, dtype=NODE),
            np.zeros(size, dtype=np.int64),
            np.zeros((size, SEARCHED), dtype=OCCURRENCE),
            np.zeros(LONGEST, dtype=np.int64),
            np.zeros(ngrams.orders, dtype=np.int64),
        )
        self.counts = np.full(places, -1, dtype=np.int64)
        self.heard, self._recent = np.zeros(places, dtype=HEARD), np.zeros((places, size), dtype=np.int64)
        self._desk = allocate_desk(ngrams.writing, places * size, ngrams.orders, size)
        self.heard["share"] = 1.0
        self.listed = allocate_listed(sources, size)
        explores = explores and self.reads and not chains
        self._settings = np.array((chains, explores, ngrams.observed), dtype=SETTINGS)[()]
        self._find, self._learn = TypedLoop(find), TypedLoop(learn)
        self._go_on = TypedLoop(go_on)
        self._owners: list[weakref.ref[Any] | None] = [None] * places

    def take_place(self, owner: Any) -> int:
        """A place that is `owner`'s as long as it lives."""
        with self.memory.lock:
            for place, reference in enumerate(self._owners):
                if reference is None or reference() is None:
                    self._owners[place] = weakref.ref(owner)
                    return place
            places = 2 * len(self._owners)
            self.texts = with_room(self.texts, places, 0)
            arrays = self.nodes, self.heard, self._recent
            self.nodes, self.heard, self._recent = (_grown(array, places) for array in arrays)
            self.counts = np.concatenate([self.counts, np.full_like(self.counts, -1)])
            self._owners += [None] * (places - len(self._owners))
            return self.take_place(owner)

    def begin(self, place: int, tokens: Sequence[int] | NDArray[np.integer], before: Sequence[int] = ()) -> None:
        """Begin a text in a place; the tokens `before` are searched as if they stood before it."""
        new = np.array([*before, *tokens], dtype=np.int64) if len(before) else np.array(tokens, dtype=np.int64)
        with self.memory.lock:
            self.texts = with_room(self.texts, 0, len(new))
            self.counts[place] = -1
            self.listed.record[:] = PRIOR  # each source is believed as it says
            self._extend(place, len(before), new, 0 if self.reads else len(new))

    def extend(self, place: int, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Extend the text in a place by tokens without predictions."""
        with self.memory.lock:
            self.make_room(len(tokens))
            self._extend(place, -1, np.array(tokens, dtype=np.int64), 0)

    def list_paths(self, paths: Sequence[TokenPaths]) -> None:
        """Search what the sources of the text list now."""
        self.listed = with_paths(self.listed, paths)

    def find(self, wanted: Wanted) -> None:
        """Draft after some texts, into `nodes` and `counts`."""
        self._find(wanted, self._known, self.room)

    def _extend(self, place: int, before: int, tokens: NDArray[np.int64], taught: int) -> None:
        clock = self.memory.ngrams.tick() if taught else 0
        self._go_on(place, before, tokens, taught, clock, self._known, self._desk)

    @property
    def _known(self) -> Known:
        places = self.texts, self.heard, self._recent, self.listed, self.nodes, self.counts
        return Known(self.memory.ngrams.entries, *places, self._weights, self._settings)

    def learn(self, step: Step) -> int:
        """Learn from a step: its tokens are of the texts then, and their drafts are done with.

        Returns:
            How many drafted tokens were accepted.
        """
        ngrams = self.memory.ngrams
        self.make_room(len(step.tokens))
        if len(step.ids) > len(self._desk.following):
            self._desk = allocate_desk(ngrams.writing, 2 * len(step.ids), ngrams.orders, self.nodes.shape[1])
        accepted, lost = self._learn(step, ngrams.tick(), self._known, self._desk)
        if lost:
            self._recall(step.places[step.places >= 0])
        return int(accepted)

    def _recall(self, places: NDArray[np.int64]) -> None:
        """Have the memory learn texts, as far as it has room, of which predictions are not what is selected."""
        heard = self.heard[places]
        for place in places[(heard["share"] < UNTRUSTED) & (heard["recalled"] == 0)].tolist():
            self.heard["recalled"][place] = 1
            self._extend(place, -1, np.empty(0, dtype=np.int64), self.memory.ngrams.capacity)

    def make_room(self, tokens: int) -> None:
        """Make room for as many more tokens of each text."""
        self.texts = with_room(self.texts, 0, int(self.texts.lengths.max()) + tokens)


def _grown(array: NDArray[Any], places: int) -> NDArray[Any]:
    """The same array with more places."""
    longer = np.zeros((places, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
