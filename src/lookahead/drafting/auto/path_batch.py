"""The likeliest paths after many texts, for engines that verify chains and count the microseconds of a draft."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.path_arrays import allocate_paths
from lookahead.drafting.auto.path_lessons import PathNotes, VerifiedPaths, allocate_lessons, learn_paths
from lookahead.drafting.auto.search import SUREST, Evidences, Wanted, allocate_room, find_paths
from lookahead.drafting.auto.sources import NOTHING_RECENT
from lookahead.drafting.auto.texts import REACH, ContextMatches, allocate_followed


class Drafts(NamedTuple):
    """What is drafted for the texts of a batch.

    Attributes:
        tokens: The drafts, `[rows, longest]`.
        counts: How many tokens each has, `[rows]`.
        lost: How much those that bring less than they cost lack of it, in all, in tokens.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    lost: float


REJECTED = 3
"""See `PathBatch`."""


class PathBatch:
    """Drafts for many texts what `AutoDrafter` would draft if it sent one path alone: the likeliest token from n-gram
    memory and matches in the text, then the likeliest one after that. One call drafts for all of them, and one learns
    from all of them.

    Args:
        memory: What is known about the model.
        places: Most texts at once.
        longest: Most tokens of a draft.
        surest: Highest probability that a token is given after another.
        reach: Tokens of each text that are searched, at least.
        rejected: Of so many tokens that were rejected, what the model says after them is learned. What comes after more
            of them is hardly ever asked for, and takes the place of what is.
        reads: Whether steps tell what the model predicts. Else what was selected stands for that.

    Attributes:
        memory, places: See above.
        texts: The text in each place.
        paths: The draft of each, and what is known of it.
    """

    def __init__(
        self,
        memory: DraftMemory,
        places: int,
        longest: int,
        surest: float = SUREST,
        reach: int = REACH,
        rejected: int = REJECTED,
        reads: bool = True,
    ) -> None:
        ngrams = memory.ngrams
        self.memory, self.places = memory, places
        self.texts = ContextMatches(reach, places=places)
        with memory.lock:
            self.paths = allocate_paths(places, longest, memory)
        self._longest, self._surest = longest, surest
        self._notes = PathNotes(ngrams.orders, ngrams.top_k if reads else 1)
        self._followed = allocate_followed(self.paths.nodes.tokens.shape[1])
        self._room = allocate_room(memory.weights.values, self.paths.proposals.tokens.shape[1])
        self._taught = allocate_lessons(longest, self._notes.arrays, rejected, reads)
        self._learn, self._find = TypedLoop(learn_paths), TypedLoop(find_paths)

    def learn(self, step: VerifiedPaths) -> int:
        """Let texts go on, and learn from them; the drafts that they had are done with.

        Returns:
            How many drafted tokens were accepted.
        """
        self.texts.make_room(int(step.lengths.max(initial=0)))
        self._notes.make_room(len(step.places) * (1 + self._longest))
        with self.memory.lock:
            taught = self._taught._replace(notes=self._notes.arrays)
            accepted = int(self._learn(step, self.texts.arrays, self.paths, taught))
            self._notes.write(self.memory.ngrams)
        return accepted

    def propose(self, places: NDArray[np.int64], most_tokens: int, least: float = 0.0, worth: float = 0.0) -> Drafts:
        """Draft after the texts in these places, each given once.

        Args:
            places: `[rows]`; -1 where no draft is wanted.
            most_tokens: Most tokens of a text; one token more than its draft has to fit.
            least: How likely each drafted token is to be accepted with all before it, at least.
            worth: How likely it has to be to bring what it costs.
        """
        ngrams, weights = self.memory.ngrams, self.memory.weights
        drafts, counts = np.zeros((len(places), self._longest), dtype=np.int64), np.zeros(len(places), dtype=np.int64)
        wanted = Wanted(0, self._longest, float(least), self._surest)
        with self.memory.lock:
            known = Evidences(ngrams.entries, self._followed, NOTHING_RECENT, weights.columns)
            arrays = self.texts.arrays, self.paths, known, self._room
            lost = self._find(places, wanted, most_tokens, float(worth), *arrays, drafts, counts)
        return Drafts(drafts, counts, float(lost))
