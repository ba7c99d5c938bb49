"""The likeliest path alone, for engines that verify chains and count the microseconds of a draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.context_matches import LONGEST, ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.path_lessons import PathLessons
from lookahead.drafting.auto.path_notes import PathNotes
from lookahead.drafting.auto.recent_predictions import RecentArrays
from lookahead.drafting.auto.rejected_siblings import RejectedSiblings
from lookahead.drafting.auto.search import SUREST, TreeSearch
from lookahead.drafting.auto.trust import Trust, mix_in
from lookahead.drafting.auto.worth import Worth

_KNOWN = 3
"""Contexts of so many tokens say enough of what follows a sure text."""

_RECALLED = 0.95
"""How likely a token was, if it was selected where it was sure."""

_NONE_RECENT = RecentArrays(np.empty(0, dtype=np.int64), np.empty(0))


class PathSearch:
    """What the texts of one batch share: the memory, and what their drafts were worth.

    Args:
        memory: What is known about the model.
        longest: Most tokens of a draft.
        surest: Highest probability that a token is given after another.

    Attributes:
        notes: What steps showed, until `write`.
        lessons: Teach what proposals were worth.
    """

    def __init__(self, memory: DraftMemory, longest: int, surest: float = SUREST) -> None:
        self.memory = memory
        self.longest = longest
        self.notes = PathNotes(memory.ngrams.orders)
        self._surest = surest
        self._worth: Worth | None = None
        first = self.new_tree()
        self._worth = first.worth
        self.lessons = PathLessons(memory.acceptance, first.worth, len(first.nodes.tokens), len(first.proposals.tokens))

    def new_tree(self) -> TreeSearch:
        """Room for the searches of one text, which lasts until what a search found is verified."""
        with self.memory.lock:
            listed, longest = (RejectedSiblings.name,), self.longest
            return TreeSearch(1, self.memory, None, listed, self._surest, chain=longest, worth=self._worth)

    def write(self) -> None:
        """Write what the texts learned to the memory."""
        self.notes.write(self.memory)


class PathDrafter:
    """Drafts for one text what `AutoDrafter` would draft if it sent one path alone: the likeliest token from n-gram
    memory and matches in the text, then the likeliest one after that. There are no trees on its way.

    Args:
        shared: What it shares with the drafters of other texts. Whoever made it writes what they learn to the memory.
    """

    def __init__(self, shared: PathSearch) -> None:
        self._shared = shared
        self._memory = shared.memory
        self._matches = ContextMatches()
        self._tree = shared.new_tree()
        self._end = np.empty(0, dtype=np.int64)  # the last tokens of the text
        self._draft: NDArray[np.int64] | None = None  # what was found after it, if that was asked for
        self._known: NDArray[np.int64] = self._end  # the longest context that the memory knows at each token of it
        self._trust = Trust()

    def start(self, text: NDArray[np.integer]) -> None:
        """Begin a text, `[tokens]`."""
        self._matches.start(text.astype(np.int64))
        self._end, self._draft = text[-LONGEST:].astype(np.int64), None
        self._trust.start()
        self._tree.listed.children[0] = -1

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on, and the last draft is done with."""
        new = np.array(tokens, dtype=np.int64)
        self._matches.extend(new)
        self._end = np.concatenate([self._end, new])[-LONGEST:]
        self._draft = None

    def propose(self, most: int, least: float = 0.0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The likeliest path of at most `most` tokens.

        Args:
            most: Its longest length.
            least: How likely each token is to be accepted with all before it, at least.

        Returns:
            Its tokens, and how likely each is to be accepted with all before it, `[drafted]` each, until the next one
            is asked for.
        """
        tree = self._tree
        with self._memory.lock:
            sources = tree.ask(self._matches, None, _NONE_RECENT)
            count = tree.search(self._end, 1, min(most, self._shared.longest), sources, least)
        tree.listed.children[0] = -1  # what was said after a token that was rejected is of use once
        self._draft = tree.found(count)[0]
        self._known = tree.nodes.known[tree.root : tree.root + count + 1]
        return self._draft, tree.path_probabilities

    def learn(
        self,
        selected: Sequence[int],
        top_ids: NDArray[np.int64],
        top_probabilities: NDArray[np.float32],
    ) -> None:
        """Learn from a step, before the text is extended by what it selected.

        Args:
            selected: The accepted part of the draft, and one token more.
            top_ids: The likeliest tokens after the text and after each of the first tokens of the draft, likeliest
                first, `[read, listed]`; at least as many rows as there are selected tokens.
            top_probabilities: Their probabilities, likewise.
        """
        self._trust.note_likeliest(selected, top_ids[: len(selected), 0].tolist())
        if self._trust.share < 1:
            top_ids, top_probabilities = _as_selected(selected, top_ids, top_probabilities, self._trust.share)
        if self._draft is not None:
            tree, chosen = self._tree, np.array(selected, dtype=np.int64)
            with self._memory.lock:
                beside = self._memory.acceptance.off_path * self._trust.share**2
                arrays = tree.nodes, tree.proposals, tree.listed
                self._shared.lessons.teach(tree.root, chosen, top_ids, top_probabilities, beside, *arrays)
        self._note(len(selected), top_ids, top_probabilities)

    def recall(self, selected: Sequence[int]) -> None:
        """Remember what a step selected that was sure beforehand, and of which nothing else is known; what the memory
        knows already stays as it is. See `learn`."""
        if self._draft is None or self._known[: len(selected)].min() >= _KNOWN:
            return
        ids = np.array(selected, dtype=np.int64)[:, None]
        self._note(len(ids), ids, np.full(ids.shape, _RECALLED, dtype=np.float32))

    def _note(self, known: int, top_ids: NDArray[np.int64], shares: NDArray[np.float32]) -> None:
        """What follows the end of the text and the tokens of the draft."""
        draft = self._end[:0] if self._draft is None else self._draft[: len(top_ids) - 1]
        self._shared.notes.add(self._end, draft, known, top_ids, shares)


def _as_selected(
    selected: Sequence[int], ids: NDArray[np.int64], shares: NDArray[np.float32], trust: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What selected tokens say, where they are not those that the model thinks likeliest: to the share that those
    account for, what the model says, and for the rest what was selected. Of what was not selected nothing is known."""
    count = len(selected)
    ids, shares = ids[:count].copy(), shares[:count].copy()
    for row, token in enumerate(selected):
        mix_in(token, ids[row], shares[row], trust)
    return ids, shares
