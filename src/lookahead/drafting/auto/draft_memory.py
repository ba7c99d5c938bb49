"""What drafting learns about a model: its predictions after short contexts."""

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

    A set-associative hash table for each context length, in arrays of fixed size: a context belongs to one set, which
    keeps `WAYS` contexts, identified by a 62-bit hash. A context that comes again takes the new prediction
    (that of a single token keeps `old_share` of the old one); in a full set the one that was written longest ago makes
    room. An entry takes 16 + 8 * top_k bytes (80 for the usual eight), so the whole memory takes
    `orders * capacity * 80` bytes, allocated at the beginning; an operating system that fills pages on first use,
    as Linux does, charges less until then.

    Attributes:
        entries: The arrays, as compiled loops take them.
        writing: How they write them.
        lock: Held by whoever reads or changes the arrays, if several threads may. A drafter holds it for one proposal
            or one observation at a time, the methods here as long as they need it.
        batches: The `DraftBatch` of those who draft from it, by their settings.
        clock: How often something was inserted, here or in what this memory came from; it dates the entries.
        vocabulary: How many tokens the model has that it is about.

    Args:
        orders: Longest context, in tokens. At least 1.
        capacity: Contexts kept for each context length; rounded up to a power of two, at least `WAYS`.
        top_k: Next tokens kept for each context. At least 1.
        old_share: How far the prediction after a single token keeps what it was before, from 0 to below 1: so short a
            context comes again in other surroundings.
        observed: What is inserted are tokens of texts that were seen to follow, not predictions of a model. Contexts
            of all lengths keep `old_share` of what they were then, and a token that followed once counts `1 -
            old_share`: so tokens that come often count most, and lately more than long ago.

    Raises:
        InvalidArgumentError: A size is out of range.
    """

    def __init__(
        self, orders: int = 4, capacity: int = 1 << 15, top_k: int = 8, old_share: float = 0.3, observed: bool = False
    ) -> None:
        requirement = "is out of range; it must be at least 0 and below 1"
        old_share = finite_number("old_share", old_share, requirement)
        require(0 <= old_share < 1, "old_share", old_share, requirement)
        orders, top_k = whole_number("orders", orders, 1), whole_number("top_k", top_k, 1)
        capacity = whole_number("capacity", capacity, 1)
        yes_or_no("observed", observed)
        self.orders, self.top_k = orders, top_k
        self.old_share, self.observed = old_share, observed
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
        room, places = np.zeros(2 * top_k, dtype=WRITTEN), np.zeros((3, orders), dtype=np.int64)
        self.writing = Writing(float(old_share), blended, first_log, room, *places)

    @classmethod
    def of_texts(cls, capacity: int = 1 << 15) -> DraftMemory:
        """A memory of what followed in prompts and outputs, for engines that show no logits."""
        return cls(len(TEXT_WEIGHTS["nothing"]) - 1, capacity, old_share=OLD_SHARE, observed=True)

    def clear(self) -> None:
        """Forget everything. Takes far less time than arrays of another one, whose pages the system has to fill."""
        self.batches.clear()
        if self.clock:
            self.entries.heads.view(np.uint8).fill(0)  # numpy fills records one by one
            self.clock = 0
        self.entries.evidence.fill(EVIDENCE_PRIOR)

    def fit(self, vocabulary: int) -> None:
        """Forget the contexts that were followed by tokens which a vocabulary of this size does not have: a model may
        have had more when they were learned."""
        with self.lock:
            if vocabulary < self.vocabulary and self.clock:
                unknown = (self.entries.followers["token"] >= vocabulary).any(axis=-1)
                self.entries.heads["tag"][unknown] = 0
            self.vocabulary = vocabulary

    def occupy(self) -> None:
        """Have the system fill all pages now, rather than one by one when they are first written to."""
        if not self.clock:
            self.entries.heads.view(np.uint8).fill(0)
            self.entries.followers.view(np.uint8).fill(0)

    def statistics(self) -> dict[str, Any]:
        """How many contexts of each length are kept, how many fit, and the size of the arrays in bytes."""
        heads, followers, _ = self.entries
        with self.lock:
            entries = [int(np.count_nonzero(tags)) for tags in heads["tag"]]
        return {"entries": entries, "capacity": self.capacity, "bytes": heads.nbytes + followers.nbytes}
