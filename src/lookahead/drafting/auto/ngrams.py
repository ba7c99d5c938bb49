"""A memory of what the model predicts after short contexts: every node of every step is a lesson.

A step runs the model on dozens of short paths, and its prediction after each of them is an answer to the question
"what comes after these tokens?", whether the path was accepted or not. The answers are kept by the last one, two, ...
tokens of the path. Token recycling (arXiv 2408.08696) keeps them by the last token alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.drafting.stored_arrays import MOST_BYTES, DamagedFileError, expect
from lookahead.errors import InvalidArgumentError

WAYS = 4
"""Entries in a set: the places where one context may be kept."""

LEAST_PROBABILITY = 1e-4
"""Smallest probability that is distinguished from zero."""

_UNLISTED = 0.3
"""What a token that is not listed is taken to have of the probability of the last one that is."""

EVIDENCE_PRIOR = 20.0
"""Tokens of each kind of evidence that are counted beforehand, as accepted as often as they should be."""

FIRST_PRIME, SECOND_PRIME = 2147483647, 2147483629
FIRST_FACTOR, SECOND_FACTOR = 1103515245, 1664525
"""Two polynomial hashes of 31 bits each; products stay below 2^62, so compiled and interpreted sums agree."""


ENTRY = np.dtype(
    [
        ("tag", np.int64),  # hash of the context; 0 where nothing is kept
        ("stamp", np.uint32),  # when it was written
        ("floor", np.float32),  # natural logarithm of the probability of a token that is not listed: an estimate
    ]
)
FOLLOWER = np.dtype([("token", np.int32), ("log", np.float32)])
"""A token that may come next, -1 where there are no more, and the natural logarithm of its probability."""


class Entries(NamedTuple):
    """The arrays of `NGramMemory`: each context length has its own sets of `WAYS` places.

    Attributes:
        heads: `ENTRY`s, `[orders * sets * WAYS]`.
        followers: The next tokens of each, likeliest first, `FOLLOWER`s, `[orders * sets * WAYS, top_k]`.
        lookups: How often contexts of each length were looked up, and how often they were there, `[orders, 2]`.
        evidence: How many drafted tokens were accepted lately, and how many should have been by their probabilities, by
            kind of evidence: the class of the match that they followed, from 1, and the length of the longest context
            after which the memory named them; 0 for none, `[9, orders + 1, 2]`.
    """

    heads: NDArray[Any]
    followers: NDArray[Any]
    lookups: NDArray[np.int64]
    evidence: NDArray[np.float64]


class Writing(NamedTuple):
    """How entries are written, and room for one of them.

    Attributes:
        old_share: What a blended entry keeps of what it was.
        blended: Entries of contexts of up to so many tokens are blended with what was there.
        first_log: Added to the logarithms of a new entry.
        logs: Of the new probabilities, the last one that of a token that is not listed, `[top_k + 1]`.
        tokens, shares: Those of both predictions while they are blended, `[2 * top_k]`.
    """

    old_share: float
    blended: int
    first_log: float
    logs: NDArray[np.float32]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]


@inner
def entry_of(first: int, second: int, order: int, entries: Entries) -> int:
    """Where the context with these two hashes is kept, of `order + 1` tokens; -1 if it is not."""
    heads = entries.heads
    sets = len(heads) // (len(entries.lookups) * WAYS)
    tag = (first << 31 | second) + 1
    begin = (order * sets + (first & (sets - 1))) * WAYS
    for place in range(begin, begin + WAYS):
        if heads[place]["tag"] == tag:
            return place
    return -1


@inner
def look_up(context: NDArray[np.int64], size: int, entries: Entries, slots: NDArray[np.int64]) -> int:
    """Find the contexts of the last 1, 2, ... tokens of a path, up to one that is not kept.

    Args:
        context: The last tokens of the path, the very last one first; `size` of them count.
        size: See there.
        entries: The memory.
        slots: Gets where each is kept.

    Returns:
        How many are.
    """
    first = second = 1
    for order in range(min(len(slots), size)):
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        slots[order] = entry_of(first, second, order, entries)
        entries.lookups[order, 0] += 1
        if slots[order] < 0:
            return order
        entries.lookups[order, 1] += 1
    return min(len(slots), size)


@inner
def _take_logs(wide: int, probabilities: NDArray[np.float32], logs: NDArray[np.float32]) -> None:
    """Write the logarithms of the first `wide` probabilities, and of one that is not listed, to `logs`."""
    total = 0.0
    for rank in range(wide):
        total += probabilities[rank]
        logs[rank] = log(max(float(probabilities[rank]), LEAST_PROBABILITY))
    rest = min(float(probabilities[wide - 1]), 1 - total) * _UNLISTED
    logs[len(logs) - 1] = log(max(rest, LEAST_PROBABILITY))


@inner
def _blend(slot: int, wide: int, ids: NDArray[np.int64], entries: Entries, writing: Writing) -> None:
    """Update a stored prediction as a moving average with weight `old_share` on the old one."""
    old_share, _, _, logs, tokens, shares = writing
    head, followers = entries.heads[slot], entries.followers[slot]
    count = 0
    for rank in range(wide):
        tokens[count], shares[count] = ids[rank], (1 - old_share) * exp(float(logs[rank]))
        count += 1
    for rank in range(len(followers)):
        token = int(followers[rank]["token"])
        if token < 0:
            break
        place = 0
        while place < count and tokens[place] != token:
            place += 1
        if place == count:
            tokens[count], shares[count] = token, 0.0
            count += 1
        shares[place] += old_share * exp(float(followers[rank]["log"]))
    for rank in range(min(len(followers), count)):
        best = rank
        for place in range(rank + 1, count):
            best = place if shares[place] > shares[best] else best
        token, share = tokens[best], shares[best]
        tokens[best], shares[best] = tokens[rank], shares[rank]
        followers[rank]["token"], followers[rank]["log"] = token, log(max(share, LEAST_PROBABILITY))
    floor = (1 - old_share) * exp(float(logs[len(followers)])) + old_share * exp(float(head["floor"]))
    head["floor"] = log(max(floor, LEAST_PROBABILITY))


@inner
def _place_for(tag: int, begin: int, heads: NDArray[Any]) -> int:
    """Place for this context in the set that begins at `begin`: its old one, else an empty one, else the oldest."""
    slot, oldest = begin, int(heads[begin]["stamp"])
    for place in range(begin, begin + WAYS):
        if heads[place]["tag"] == tag:
            return place
        stamp = -1 if heads[place]["tag"] == 0 else int(heads[place]["stamp"])
        if stamp < oldest:
            slot, oldest = place, stamp
    return slot


@inner
def write_entry(
    context: NDArray[np.int64],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    clock: int,
    entries: Entries,
    writing: Writing,
) -> None:
    """Keep what is predicted after a context, for each length of it.

    Args:
        context: Its last tokens, the very last one first, `[tokens]`.
        ids: The likeliest next tokens, likeliest first, `[listed]`; -1 where there are no more.
        probabilities: Their probabilities, `[listed]`.
        clock: Dates the entries.
        entries: The memory.
        writing: See there.
    """
    heads, followers, lookups, _ = entries
    sets, top_k, wide = len(heads) // (len(lookups) * WAYS), followers.shape[1], 0
    while wide < min(top_k, len(ids)) and ids[wide] >= 0:
        wide += 1
    if wide == 0:
        return
    _take_logs(wide, probabilities, writing.logs)
    first = second = 1
    for order in range(len(context)):
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        tag = (first << 31 | second) + 1
        slot = _place_for(tag, (order * sets + (first & (sets - 1))) * WAYS, heads)
        head = heads[slot]
        head["stamp"] = clock
        if order < writing.blended and writing.old_share > 0 and head["tag"] == tag:
            _blend(slot, wide, ids, entries, writing)
            continue
        head["tag"], head["floor"] = tag, writing.logs[top_k]
        for rank in range(top_k):
            followers[slot, rank]["token"] = ids[rank] if rank < wide else -1
            followers[slot, rank]["log"] = writing.logs[rank] + writing.first_log


@compiled
def _write_entries(
    contexts: NDArray[np.int64],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    clock: int,
    entries: Entries,
    writing: Writing,
) -> None:
    """`NGramMemory.insert`."""
    for row in range(len(contexts)):
        size = 0
        while size < contexts.shape[1] and contexts[row, size] >= 0:
            size += 1
        write_entry(contexts[row, :size], ids[row], probabilities[row], clock, entries, writing)


@compiled
def _find_entries(contexts: NDArray[np.int64], entries: Entries, slots: NDArray[np.int64]) -> None:
    """Find where each length of each context is kept; -1 where it is not."""
    for row in range(len(contexts)):
        first = second = 1
        for order in range(contexts.shape[1]):
            token = contexts[row, order]
            if token < 0:
                break
            first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
            second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
            slots[row, order] = entry_of(first, second, order, entries)
            entries.lookups[order, 0] += 1
            entries.lookups[order, 1] += 1 if slots[row, order] >= 0 else 0


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


class NGramMemory:
    """The model's `top_k` likeliest next tokens and their probabilities after contexts of 1, 2, ... tokens.

    A set-associative hash table for each context length, in arrays of fixed size: a context belongs to one set, which
    keeps `WAYS` contexts, identified by a 62-bit hash. A context that comes again takes the new prediction
    (that of a single token keeps `old_share` of the old one); in a full set the one that was written longest ago makes
    room. An entry takes 16 + 8 * top_k bytes (80 for the usual eight), so the whole memory takes
    `orders * capacity * 80` bytes, allocated at the beginning; an operating system that fills pages on first use,
    as Linux does, charges less until then.

    Attributes:
        entries: The arrays, as compiled loops take them.

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
        self.sets = 1 << max((capacity - 1).bit_length() - (WAYS - 1).bit_length(), 0)
        slots = orders * self.sets * WAYS
        heads, followers = np.zeros(slots, dtype=ENTRY), np.zeros((slots, top_k), dtype=FOLLOWER)
        evidence = np.full((1 + len(MATCH_CLASSES), orders + 1, 2), EVIDENCE_PRIOR)
        self.entries = Entries(heads, followers, np.zeros((orders, 2), dtype=np.int64), evidence)
        self._clock = 0
        tokens, shares = np.zeros(2 * top_k, dtype=np.int64), np.zeros(2 * top_k)
        blended, first_log = (orders, log(1 - old_share)) if observed else (1, 0.0)
        self.writing = Writing(float(old_share), blended, first_log, np.zeros(top_k + 1, np.float32), tokens, shares)

    def clear(self) -> None:
        """Forget everything. Takes far less time than arrays of another one, whose pages the system has to fill."""
        if self._clock:
            self.entries.heads.view(np.uint8).fill(0)  # numpy fills records one by one
            self._clock = 0
        self.entries.lookups.fill(0)
        self.entries.evidence.fill(EVIDENCE_PRIOR)

    def occupy(self) -> None:
        """Have the system fill all pages now, rather than one by one when they are first written to."""
        if not self._clock:
            self.entries.heads.view(np.uint8).fill(0)
            self.entries.followers.view(np.uint8).fill(0)

    @property
    def capacity(self) -> int:
        """Contexts kept for each context length."""
        return self.sets * WAYS

    @property
    def clock(self) -> int:
        """How often something was inserted, here or in what this memory came from; it dates the entries."""
        return self._clock

    def tick(self) -> int:
        """The time of what is inserted next."""
        self._clock += 1
        return self._clock

    def insert(self, contexts: NDArray[np.int64], ids: NDArray[np.int64], probabilities: NDArray[np.float32]) -> None:
        """Keep what the model predicts after each context; of equal contexts the last one counts.

        Args:
            contexts: The last tokens of each context, the very last in column 0, `[contexts, at most orders]`; -1
                before the beginning of the text.
            ids: The likeliest next tokens, likeliest first, `[contexts, listed]`; -1 where there are no more.
            probabilities: Their probabilities, likewise.
        """
        _write_entries(contexts, ids, probabilities, self.tick(), self.entries, self.writing)

    def lookup(self, contexts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]:
        """What is known about each context and each length of it.

        Args:
            contexts: As for `insert`.

        Returns:
            Whether the context of each length is known, `[contexts, orders]`; the next tokens, likeliest first, -1
            where there are no more, and their probabilities, `[contexts, orders, top_k]` both.
        """
        slots = self.slots(contexts)
        known, followers = slots >= 0, self.entries.followers[slots]
        ids = np.where(known[:, :, None], followers["token"], np.int32(-1))
        return known, ids, np.where(ids >= 0, np.exp(followers["log"]), np.float32(0))

    def slots(self, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each length of each context is kept, -1 where it is not; shapes as for `lookup`."""
        slots = np.full(contexts.shape, -1, dtype=np.int64)
        _find_entries(contexts, self.entries, slots)
        return slots

    def statistics(self) -> MemoryStatistics:
        """What the memory holds and how it was used."""
        heads, followers, lookups, _ = self.entries
        used = heads["tag"] != 0
        return MemoryStatistics(
            entries=used.reshape(self.orders, -1).sum(axis=1).tolist(),
            capacity=self.capacity,
            lookups=lookups[:, 0].tolist(),
            hits=lookups[:, 1].tolist(),
            fan_out=float((followers["token"][used] >= 0).sum(axis=1).mean()) if used.any() else 0.0,
            bytes=heads.nbytes + followers.nbytes,
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that is kept, as arrays by name, for a file."""
        used = np.flatnonzero(self.entries.heads["tag"])
        heads, followers = self.entries.heads[used], self.entries.followers[used]
        return {
            "ngram_sizes": np.array([self.orders, self.capacity, self.top_k, self._clock], dtype=np.int64),
            "ngram_old_share": np.array(self.old_share),
            "ngram_slots": used.astype(np.int64),
            "ngram_tags": heads["tag"],
            "ngram_stamps": heads["stamp"],
            "ngram_ids": followers["token"],
            "ngram_logs": followers["log"],
            "ngram_floors": heads["floor"],
            "ngram_evidence": self.entries.evidence.copy(),
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
        heads, followers = np.zeros(count, dtype=ENTRY), np.zeros((count, top_k), dtype=FOLLOWER)
        heads["tag"], heads["stamp"] = tags, stamps
        heads["floor"] = expect(arrays, "ngram_floors", np.float32, (count,))
        followers["token"] = expect(arrays, "ngram_ids", np.int32, (count, top_k))
        followers["log"] = expect(arrays, "ngram_logs", np.float32, (count, top_k))
        memory.entries.heads[slots], memory.entries.followers[slots] = heads, followers
        if "ngram_evidence" in [*arrays]:  # older files have none
            evidence = expect(arrays, "ngram_evidence", np.float64, memory.entries.evidence.shape)
            if not (np.isfinite(evidence) & (evidence >= EVIDENCE_PRIOR / 2)).all():
                raise DamagedFileError("its record of what came true is none")
            memory.entries.evidence[:] = evidence
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
        heads, others = self.entries.heads, other.entries.heads
        own_stamps, other_stamps = (
            _aged(memory.entries.heads["stamp"], since, clock - memory._clock) for memory in (self, other)
        )
        heads["stamp"] = own_stamps
        self._clock = clock
        # Only sets to which the other memory has something to add.
        sets = np.flatnonzero((others["tag"].reshape(-1, WAYS) != 0).any(axis=1))
        new = _side_by_side(heads, others, sets)
        tags, ages = new["tag"], _side_by_side(own_stamps, other_stamps, sets)
        ages[tags == 0] = -1
        same = (tags[:, :WAYS, None] == tags[:, None, WAYS:]) & (tags[:, :WAYS, None] != 0)
        newer = ages[:, None, WAYS:] > ages[:, :WAYS, None]
        ages[:, :WAYS][(same & newer).any(axis=2)] = -1
        ages[:, WAYS:][(same & ~newer).any(axis=1)] = -1
        kept = np.sort(np.argsort(-ages, axis=1, kind="stable")[:, :WAYS], axis=1)  # [sets, ways]
        tags[ages < 0] = 0
        new["stamp"] = np.maximum(ages, 0)
        rows, slots = np.arange(len(sets))[:, None], sets[:, None] * WAYS + np.arange(WAYS)
        heads[slots] = new[rows, kept]
        self.entries.evidence[:] = (self.entries.evidence + other.entries.evidence) / 2
        self.entries.followers[slots] = _side_by_side(self.entries.followers, other.entries.followers, sets)[rows, kept]

    def _could_hold(self, slots: NDArray[np.int64], tags: NDArray[np.int64]) -> bool:
        """Whether contexts with these hashes may be kept in these places, which ascend."""
        if not len(slots):
            return True
        if slots[0] < 0 or slots[-1] >= len(self.entries.heads) or bool((np.diff(slots) <= 0).any()) or tags.min() < 1:
            return False
        return bool((slots // WAYS % self.sets == (tags - 1 >> 31) & (self.sets - 1)).all())


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
