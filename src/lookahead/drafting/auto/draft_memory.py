"""Memory of a model's predictions after short contexts."""

from __future__ import annotations

from math import log
from sys import maxsize
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from lookahead.drafting.auto.ngrams import ENTRY, EVIDENCE_PRIOR, FOLLOWER, OLD_SHARE, WAYS, WRITTEN, Entries, Writing
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.drafting.auto.weights import TEXT_WEIGHTS
from lookahead.values import finite_number, require, whole_number, yes_or_no


class DraftMemory:
    """The model's `top_k` likeliest next tokens and their probabilities after contexts of 1, 2, ... tokens.

    Each context length has a set-associative hash table in arrays of fixed size: a context belongs to one set of `WAYS`
    entries, and is identified by a 62-bit hash. A repeated context takes the new prediction; after a single token the
    entry keeps `old_share` of the old one. In a full set the entry with the oldest write is replaced. An entry takes
    16 + 8 * top_k bytes (80 by default), so the memory takes `orders * capacity * 80` bytes, allocated at the start. A
    system that maps pages at first use, like Linux, counts less until then.

    Attributes:
        entries: The arrays, in the form for compiled loops.
        writing: Options and buffers for writing to them.
        lock: Lock for reading or changing the arrays from several threads. A drafter holds it for one proposal or one
            observation at a time, and a method of this class while it runs.
        batches: The `DraftBatch` objects that use this memory, by their settings.
        clock: Number of insertions, also before a memory was saved and loaded; it dates the entries.
        vocabulary: Vocabulary size of the model.

    Args:
        orders: Longest context, in tokens. At least 1.
        capacity: Contexts kept for each context length; rounded up to a power of two, at least `WAYS`.
        top_k: Next tokens kept for each context. At least 1.
        old_share: Weight of the old prediction after a single token in its update, from 0 to below 1: such short
            contexts recur in different surroundings.
        observed: Whether the memory learns from tokens that followed in texts, instead of predictions of a model. Then
            contexts of all lengths keep `old_share` of their old prediction, and a first token counts `1 - old_share`,
            so frequent and recent tokens count most.

    Raises:
        InvalidArgumentError: A size is out of range.
    """

    def __init__(
        self, orders: int = 4, capacity: int = 1 << 15, top_k: int = 8, old_share: float = 0.3, observed: bool = False
    ) -> None:
        requirement = "is out of range; it must be at least 0 and below 1"
        old_share = finite_number("old_share", old_share, requirement)
        require(0 <= old_share < 1, "old_share", old_share, requirement)
        orders = whole_number("orders", orders, 1)
        top_k = whole_number("top_k", top_k, 1)
        capacity = whole_number("capacity", capacity, 1)
        yes_or_no("observed", observed)
        self.orders = orders
        self.top_k = top_k
        self.old_share = old_share
        self.observed = observed
        #: Contexts kept for each context length.
        self.capacity = WAYS << max((capacity - 1).bit_length() - (WAYS - 1).bit_length(), 0)
        self.entries = Entries(
            np.zeros((orders, self.capacity), dtype=ENTRY),
            np.zeros((orders, self.capacity, top_k), dtype=FOLLOWER),
            np.full((1 + len(MATCH_CLASSES), orders + 1, 2), EVIDENCE_PRIOR),
        )
        self.clock = 0
        self.vocabulary = maxsize
        self.lock = RLock()
        self.batches: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
        blended, first_log = (orders, log(1 - old_share)) if observed else (1, 0.0)
        room = np.zeros(2 * top_k, dtype=WRITTEN)
        places = np.zeros((3, orders), dtype=np.int64)
        self.writing = Writing(float(old_share), blended, first_log, room, *places)

    @classmethod
    def of_texts(cls, capacity: int = 1 << 15) -> DraftMemory:
        """Return a memory of tokens that followed in prompts and outputs, for engines without access to logits."""
        return cls(len(TEXT_WEIGHTS["nothing"]) - 1, capacity, old_share=OLD_SHARE, observed=True)

    def clear(self) -> None:
        """Forget everything. Much faster than a new memory, because the pages are mapped already."""
        self.batches.clear()
        if self.clock:
            self.entries.heads.view(np.uint8).fill(0)  # as bytes, because numpy fills records one by one
            self.clock = 0
        self.entries.evidence.fill(EVIDENCE_PRIOR)

    def fit(self, vocabulary: int) -> None:
        """Set the vocabulary size, and forget contexts with a next token beyond it.

        The memory may have been filled by a model with a larger vocabulary.
        """
        with self.lock:
            if vocabulary < self.vocabulary and self.clock:
                unknown = (self.entries.followers["token"] >= vocabulary).any(axis=-1)
                self.entries.heads["tag"][unknown] = 0
            self.vocabulary = vocabulary

    def occupy(self) -> None:
        """Map all pages of the arrays now, instead of one by one at their first use."""
        if not self.clock:
            self.entries.heads.view(np.uint8).fill(0)
            self.entries.followers.view(np.uint8).fill(0)

    def statistics(self) -> dict[str, Any]:
        """Return the number of contexts of each length, the capacity, and the size of the arrays in bytes."""
        heads, followers, _ = self.entries
        with self.lock:
            entries = [int(np.count_nonzero(tags)) for tags in heads["tag"]]
        return {"entries": entries, "capacity": self.capacity, "bytes": heads.nbytes + followers.nbytes}
