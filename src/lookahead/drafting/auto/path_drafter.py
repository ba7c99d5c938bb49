"""The likeliest path alone, for engines that verify chains and count the microseconds of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.context_matches import LONGEST, ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.recent_predictions import RecentArrays
from lookahead.drafting.auto.rejected_siblings import RejectedSiblings
from lookahead.drafting.auto.search import SUREST, TreeSearch
from lookahead.drafting.auto.trust import Trust, mix_in

_KNOWN = 3
"""Contexts of so many tokens say enough of what follows a sure text."""

_RECALLED = 0.95
"""How likely a token was, if it was selected where it was sure."""

_NONE_RECENT = RecentArrays(np.empty(0, dtype=np.int64), np.empty(0))


class PathDrafter:
    """Drafts for one text what `AutoDrafter` would draft if it sent one path alone: the likeliest token from n-gram
    memory and matches in the text, then the likeliest one after that. There are no trees on its way.

    Args:
        memory: What is known about the model; texts may share it.
        longest: Most tokens of a draft.
        surest: Highest probability that a token is given after another.
    """

    def __init__(self, memory: DraftMemory, longest: int, surest: float = SUREST) -> None:
        self._memory = memory
        self._longest = longest
        self._matches = ContextMatches()
        with memory.lock:
            self._search = TreeSearch(1, memory, None, (RejectedSiblings.name,), surest, chain=longest)
        self._siblings = RejectedSiblings(self._search.nodes, memory.ngrams.top_k)
        self._end = np.empty(0, dtype=np.int64)  # the last tokens of the text
        self._draft: NDArray[np.int64] | None = None  # what was found after it, if that was asked for
        self._trust = Trust()

    def start(self, text: NDArray[np.integer]) -> None:
        """Begin a text, `[tokens]`."""
        self._matches.start(text.astype(np.int64))
        self._end, self._draft = text[-LONGEST:].astype(np.int64), None
        self._trust.start()
        self._siblings.forget()

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on, and the last draft is done with."""
        new = np.array(tokens, dtype=np.int64)
        self._matches.extend(new)
        self._end = np.concatenate([self._end, new])[-LONGEST:]
        self._draft = None

    def propose(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The likeliest path of at most `most` tokens.

        Returns:
            Its tokens, and how likely each is to be accepted with all before it, `[drafted]` each.
        """
        with self._memory.lock:
            sources = self._search.ask(self._matches, (self._siblings.propose(),), _NONE_RECENT)
            self._siblings.forget()
            count = self._search.search(self._end, 1, min(most, self._longest), sources)
            self._draft = self._search.found(count)[0].copy()
            return self._draft, self._search.path_probabilities.copy()

    def learn(
        self,
        selected: Sequence[int],
        top_ids: NDArray[np.int64],
        top_probabilities: NDArray[np.float32],
        judges: bool = True,
    ) -> None:
        """Learn from a step, before the text is extended by what it selected.

        Args:
            selected: The accepted part of the draft, and one token more.
            top_ids: The likeliest tokens after the text and after each of the first tokens of the draft, likeliest
                first, `[read, listed]`; at least as many rows as there are selected tokens.
            top_probabilities: Their probabilities, likewise.
            judges: Whether to learn how likely proposals of each kind are to be accepted, too. That takes as long as
                the rest, and one text in many is enough.
        """
        self._trust.note_likeliest(selected, top_ids[: len(selected), 0].tolist())
        if self._trust.share < 1:
            top_ids, top_probabilities = _as_selected(selected, top_ids, top_probabilities, self._trust.share)
        with self._memory.lock:
            if self._draft is not None:
                if len(selected) < len(top_ids):  # the token that was rejected has followers
                    before, first = self._search.root + len(selected) - 1, self._search.root + 1
                    self._siblings.follow(before, first, top_ids, top_probabilities)
                if judges:
                    self._teach(selected, top_ids, top_probabilities)
            self._remember(len(selected), top_ids, top_probabilities)

    def recall(self, selected: Sequence[int]) -> None:
        """Remember what a step selected that was sure beforehand, and of which nothing else is known; what the memory
        knows already stays as it is. See `learn`."""
        first = self._search.root
        if self._draft is None or self._search.nodes.known[first : first + len(selected)].min() >= _KNOWN:
            return
        ids = np.array(selected, dtype=np.int64)[:, None]
        with self._memory.lock:
            self._remember(len(ids), ids, np.full(ids.shape, _RECALLED, dtype=np.float32))

    def _teach(self, selected: Sequence[int], top_ids: NDArray[np.int64], shares: NDArray[np.float32]) -> None:
        """What the proposals of the last search were worth."""
        rows, known = len(top_ids), len(selected)
        acceptance = self._memory.acceptance
        counts = np.full(rows, acceptance.off_path * self._trust.share**2)
        counts[:known] = 1.0
        chosen = np.full(rows, -1, dtype=np.int64)
        chosen[:known] = selected
        self._search.teach(acceptance, top_ids, shares, counts, chosen, False)

    def _remember(self, known: int, top_ids: NDArray[np.int64], shares: NDArray[np.float32]) -> None:
        """What follows the end of the text and the tokens of the draft; what follows real text last, so that it
        counts."""
        orders, rows = self._memory.ngrams.orders, len(top_ids)
        draft = self._end[:0] if self._draft is None else self._draft[: rows - 1]
        tokens = np.concatenate([_before(orders), self._end[-orders:], draft])
        contexts = tokens[len(tokens) - rows + _windows(rows, orders)]
        if known < rows:
            order = np.concatenate([np.arange(known, rows), np.arange(known)])
            contexts, top_ids, shares = contexts[order], top_ids[order], shares[order]
        self._memory.ngrams.insert(contexts, top_ids, shares)


@cache
def _before(orders: int) -> NDArray[np.int64]:
    """What stands before the beginning of a text."""
    return np.full(orders, -1, dtype=np.int64)


@cache
def _windows(rows: int, orders: int) -> NDArray[np.int64]:
    """Where the last tokens of so many contexts are, each a token longer than the one before it, `[rows, orders]`."""
    return np.subtract.outer(np.arange(rows), np.arange(orders))


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
