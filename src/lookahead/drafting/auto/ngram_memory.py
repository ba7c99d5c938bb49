"""A memory of what the model predicts after short contexts: every node of every step is a lesson.

A step runs the model on dozens of short paths, and its prediction after each of them is an answer to the question
"what comes after these tokens?", whether the path was accepted or not. The answers are kept by the last one, two, ...
tokens of the path. Token recycling (arXiv 2408.08696) keeps them by the last token alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, loop_arrays, loop_tuple
from lookahead.drafting.auto.ngram_entries import (
    WAYS,
    Entries,
    Predictions,
    WritingRoom,
    hash_contexts,
    write_entries,
)
from lookahead.drafting.stored_arrays import MOST_BYTES, DamagedFileError, expect
from lookahead.errors import InvalidArgumentError

_LATEST = (1 << 32) - 1
"""Largest stamp."""

_MOST_STORED = 64
"""Longest context, and most next tokens, that a file may declare: drafting takes room for their product."""


@dataclass(frozen=True)
class MemoryStatistics:
    """What a memory holds and how it was used.

    Attributes:
        entries: Contexts kept, one number for each context length.
        capacity: Contexts that fit, for each context length.
        lookups: How often a context was looked up, for each context length.
        hits: How often it was there.
        fan_out: Mean number of next tokens kept for a context.
        bytes: Size of the arrays.
    """

    entries: list[int]
    capacity: int
    lookups: list[int]
    hits: list[int]
    fan_out: float
    bytes: int

    @property
    def hit_rates(self) -> list[float]:
        """Share of the lookups that found their context, for each context length."""
        return [hits / max(lookups, 1) for hits, lookups in zip(self.hits, self.lookups, strict=True)]


ORDERS, CAPACITY = 4, 1 << 15
"""Context lengths of a memory, and contexts of each, if nothing else is asked for."""

NO_STATISTICS = MemoryStatistics([0] * ORDERS, CAPACITY, [0] * ORDERS, [0] * ORDERS, 0.0, 0)
"""Of a memory for which there are no arrays yet."""


@compiled
def write_contexts(
    before: NDArray[np.int64],
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    nodes: NDArray[np.int64],
    contexts: NDArray[np.int64],
) -> None:
    """Write the last tokens of the path to each of the nodes of a tree to `contexts`, as `NGramMemory` takes them.

    Args:
        before: The text before the tree.
        tokens, parents: Of all nodes; a parent of -1 is the last token of the text before.
        nodes: Those whose contexts are wanted.
        contexts: Gets them, `[nodes, orders]`.
    """
    for row in range(len(nodes)):
        at = nodes[row]
        for column in range(contexts.shape[1]):
            if at >= 0:
                contexts[row, column] = tokens[at]
                at = parents[at] if parents[at] >= 0 else -1
            elif len(before) + at >= 0:
                contexts[row, column] = before[len(before) + at]
                at -= 1
            else:
                contexts[row, column] = -1


class NGramMemory:
    """The model's `top_k` likeliest next tokens and their probabilities after contexts of 1, 2, ... tokens.

    A set-associative hash table for each context length, in arrays of fixed size: a context belongs to one set, which
    keeps `WAYS` contexts, identified by a 62-bit hash. A context that comes again takes the new prediction
    (that of a single token keeps `old_share` of the old one); in a full set the one that was written longest ago makes
    room. An entry takes 16 + 8 * top_k bytes (80 for the usual eight), so the whole memory takes
    `orders * capacity * 80` bytes, allocated at the beginning; an operating system that fills pages on first use,
    as Linux does, charges less until then.

    The arrays are open to the inner loops of drafting (`ngram_entries.py`), one row for each entry:

    Attributes:
        tags: Hash of the context, `[entries]` int64; 0 where nothing is kept.
        ids: The next tokens, likeliest first, `[entries, top_k]` int32; -1 where there are no more.
        logs: Natural logarithm of their probabilities, `[entries, top_k]` float32.
        floors: The same for a token that is not among them: an estimate, `[entries]` float32.

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
        self,
        orders: int = ORDERS,
        capacity: int = CAPACITY,
        top_k: int = 8,
        old_share: float = 0.3,
        observed: bool = False,
    ) -> None:
        if not 0 <= old_share < 1:
            raise InvalidArgumentError(f"old_share={old_share} is out of range; it must be at least 0 and below 1")
        for name, value in (("orders", orders), ("capacity", capacity), ("top_k", top_k)):
            if value < 1:
                raise InvalidArgumentError(f"{name}={value} is out of range; it must be at least 1")
        self.orders = orders
        self.top_k = top_k
        self.old_share = old_share
        self.observed = observed
        self._first_log = log(1 - old_share) if observed else 0.0
        self._set_bits = max((capacity - 1).bit_length() - (WAYS - 1).bit_length(), 0)
        self._sets = 1 << self._set_bits
        slots = orders * self._sets * WAYS
        self.tags = np.zeros(slots, dtype=np.int64)
        self.ids = np.zeros((slots, top_k), dtype=np.int32)
        self.logs = np.zeros((slots, top_k), dtype=np.float32)
        self.floors = np.zeros(slots, dtype=np.float32)
        self._stamps = np.zeros(slots, dtype=np.uint32)
        self._clock = 0
        self.lookups = np.zeros(orders, dtype=np.int64)
        self.hits = np.zeros(orders, dtype=np.int64)
        tokens, shares = np.zeros(2 * top_k, dtype=np.int64), np.zeros(2 * top_k)
        self._room = WritingRoom(np.zeros(top_k + 1, dtype=np.float32), tokens, shares)
        self._ways = np.arange(WAYS)
        self._first_sets = np.arange(orders, dtype=np.int64) * self._sets

    def clear(self) -> None:
        """Forget everything. Takes far less time than arrays of another one, whose pages the system has to fill."""
        if self._clock:
            self.tags.fill(0)
            self._stamps.fill(0)
            self._clock = 0
        self.lookups.fill(0)
        self.hits.fill(0)

    def occupy(self) -> None:
        """Have the system fill all pages now, rather than one by one when they are first written to."""
        if not self._clock:
            for array in (self.tags, self.ids, self.logs, self.floors, self._stamps):
                array.fill(0)

    @property
    def sets(self) -> int:
        """Sets of each context length; a power of two."""
        return self._sets

    @property
    def entries(self) -> Entries:
        """The arrays, as compiled loops take them."""
        return Entries(self.tags, self._stamps, self.ids, self.logs, self.floors, self.lookups, self.hits, self._sets)

    @property
    def capacity(self) -> int:
        """Contexts kept for each context length."""
        return self._sets * WAYS

    @property
    def clock(self) -> int:
        """How often something was inserted, here or in what this memory came from; it dates the entries."""
        return self._clock

    def hashes(self, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The hash of the last 1, 2, ... tokens of each context, `[contexts, orders]`; 0 where there are not so many.

        Args:
            contexts: The last tokens of each context, the very last in column 0, `[contexts, orders]`; -1 before the
                beginning of the text.
        """
        hashed = np.zeros(contexts.shape, dtype=np.int64)
        hash_contexts(*loop_arrays(contexts, hashed))
        return hashed

    def insert(
        self,
        contexts: NDArray[np.int64],
        ids: NDArray[np.int64],
        probabilities: NDArray[np.float32],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """Keep what the model predicts after each context; of equal contexts the last one counts.

        Args:
            contexts: As for `hashes`.
            ids: The likeliest next tokens, likeliest first, `[contexts, at least top_k]`; fewer leave -1 behind.
            probabilities: Their probabilities, likewise.
            rows: Numbers of the contexts to insert, in this order; all of them, in theirs, if not given.
        """
        self._clock += 1
        rows = np.arange(len(contexts)) if rows is None else rows
        told, order = loop_arrays(contexts, rows)
        new, entries = loop_tuple(Predictions(ids, probabilities)), loop_tuple(self.entries)
        how = self.old_share, self.orders if self.observed else 1, self._first_log
        write_entries(told, order, self._clock, new, entries, *how, loop_tuple(self._room))

    def lookup(self, contexts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]:
        """What is known about each context and each length of it.

        Args:
            contexts: As for `hashes`.

        Returns:
            Whether the context of each length is known, `[contexts, orders]`; the next tokens, likeliest first, -1
            where there are no more, and their probabilities, `[contexts, orders, top_k]` both.
        """
        tags = self.hashes(contexts)
        places = (self._first_sets + self._set_of(tags))[:, :, None] * WAYS + self._ways
        same = self.tags[places] == tags[:, :, None]
        known = same.any(axis=2) & (tags != 0)
        slots = np.take_along_axis(places, same.argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
        self.lookups += (tags != 0).sum(axis=0)
        self.hits += known.sum(axis=0)
        ids = np.where(known[:, :, None], self.ids[slots], np.int32(-1))
        return known, ids, np.where(ids >= 0, np.exp(self.logs[slots]), np.float32(0))

    def statistics(self) -> MemoryStatistics:
        """What the memory holds and how it was used."""
        used = self.tags != 0
        return MemoryStatistics(
            entries=used.reshape(self.orders, -1).sum(axis=1).tolist(),
            capacity=self.capacity,
            lookups=self.lookups.tolist(),
            hits=self.hits.tolist(),
            fan_out=float((self.ids[used] >= 0).sum(axis=1).mean()) if used.any() else 0.0,
            bytes=self.tags.nbytes + self._stamps.nbytes + self.ids.nbytes + self.logs.nbytes + self.floors.nbytes,
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that is kept, as arrays by name, for a file."""
        used = np.flatnonzero(self.tags)
        return {
            "ngram_sizes": np.array([self.orders, self.capacity, self.top_k, self._clock], dtype=np.int64),
            "ngram_old_share": np.array(self.old_share),
            "ngram_slots": used.astype(np.int64),
            "ngram_tags": self.tags[used],
            "ngram_stamps": self._stamps[used],
            "ngram_ids": self.ids[used],
            "ngram_logs": self.logs[used],
            "ngram_floors": self.floors[used],
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> NGramMemory:
        """The memory that `to_arrays` gave.

        Raises:
            DamagedFileError: An array is missing, or they cannot be from there.
        """
        orders, capacity, top_k, clock = expect(arrays, "ngram_sizes", np.int64, (4,)).tolist()
        old_share = float(expect(arrays, "ngram_old_share", np.float64, ()))
        if not (
            1 <= orders <= _MOST_STORED
            and 1 <= top_k <= _MOST_STORED
            and 1 <= capacity <= MOST_BYTES // (orders * _entry_bytes(top_k))
            and 0 <= clock <= _LATEST
            and 0 <= old_share < 1
        ):
            raise DamagedFileError("it declares sizes that no memory has")
        memory = cls(orders, capacity, top_k, old_share)
        slots = expect(arrays, "ngram_slots", np.int64, (None,))
        count = len(slots)
        tags = expect(arrays, "ngram_tags", np.int64, (count,))
        stamps = expect(arrays, "ngram_stamps", np.uint32, (count,))
        if memory.capacity != capacity or not memory._could_hold(slots, tags) or stamps.max(initial=0) > clock:
            raise DamagedFileError("its arrays do not belong together")
        memory._clock = clock
        memory.tags[slots] = tags
        memory._stamps[slots] = stamps
        memory.ids[slots] = expect(arrays, "ngram_ids", np.int32, (count, top_k))
        memory.logs[slots] = expect(arrays, "ngram_logs", np.float32, (count, top_k))
        memory.floors[slots] = expect(arrays, "ngram_floors", np.float32, (count,))
        return memory

    def merge(self, other: NGramMemory, since: int) -> None:
        """Take in the entries of another memory, which stays as it is.

        Of one context the newest entry stays, and in a full set the newest ones. What either learned since they were
        one memory counts as learned up to now, whichever of them took more steps for it.

        Args:
            other: A memory of the same sizes.
            since: The clock of both when they were one; 0 if they never were.

        Raises:
            InvalidArgumentError: The sizes differ.
        """
        if (self.orders, self.capacity, self.top_k) != (other.orders, other.capacity, other.top_k):
            raise InvalidArgumentError(
                f"a memory of orders={other.orders}, capacity={other.capacity}, top_k={other.top_k} cannot be merged "
                f"into one of orders={self.orders}, capacity={self.capacity}, top_k={self.top_k}; use equal sizes"
            )
        clock = max(self._clock, other._clock)
        own, others = (_aged(memory._stamps, since, clock - memory._clock) for memory in (self, other))
        self._stamps[:] = own
        self._clock = clock
        # Only sets to which the other memory has something to add.
        sets = np.flatnonzero((other.tags.reshape(-1, WAYS) != 0).any(axis=1))
        tags = _side_by_side(self.tags, other.tags, sets)
        ages = _side_by_side(own, others, sets)
        ages[tags == 0] = -1
        same = (tags[:, :WAYS, None] == tags[:, None, WAYS:]) & (tags[:, :WAYS, None] != 0)
        newer = ages[:, None, WAYS:] > ages[:, :WAYS, None]
        ages[:, :WAYS][(same & newer).any(axis=2)] = -1
        ages[:, WAYS:][(same & ~newer).any(axis=1)] = -1
        kept = np.sort(np.argsort(-ages, axis=1, kind="stable")[:, :WAYS], axis=1)  # [sets, ways]
        tags[ages < 0] = 0
        slots = sets[:, None] * WAYS + self._ways
        for array, new in (
            (self.tags, tags),
            (self._stamps, np.maximum(ages, 0)),
            (self.ids, _side_by_side(self.ids, other.ids, sets)),
            (self.logs, _side_by_side(self.logs, other.logs, sets)),
            (self.floors, _side_by_side(self.floors, other.floors, sets)),
        ):
            array[slots] = new[np.arange(len(sets))[:, None], kept]

    def _could_hold(self, slots: NDArray[np.int64], tags: NDArray[np.int64]) -> bool:
        """Whether contexts with these hashes may be kept in these places, which ascend."""
        if not len(slots):
            return True
        if slots[0] < 0 or slots[-1] >= len(self.tags) or bool((np.diff(slots) <= 0).any()) or tags.min() < 1:
            return False
        return bool((slots // WAYS % self._sets == self._set_of(tags)).all())

    def _set_of(self, tags: NDArray[np.int64]) -> NDArray[np.int64]:
        sets: NDArray[np.int64] = (tags - 1 >> 31) & (self._sets - 1)
        return sets


def _entry_bytes(top_k: int) -> int:
    """Size of an entry."""
    return 16 + 8 * top_k


def _aged(stamps: NDArray[np.uint32], since: int, late: int) -> NDArray[np.int64]:
    """The stamps, those after `since` moved by `late`."""
    moved = stamps.astype(np.int64)
    moved[moved > since] += late
    return moved


def _side_by_side(one: NDArray[Any], two: NDArray[Any], sets: NDArray[np.int64]) -> NDArray[Any]:
    """The entries of some sets of two memories, `[sets, 2 * ways, ...]`."""
    shape = (-1, WAYS, *one.shape[1:])
    return np.concatenate([one.reshape(shape)[sets], two.reshape(shape)[sets]], axis=1)
