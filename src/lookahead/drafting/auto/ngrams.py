"""A memory of what the model predicts after short contexts: every node of every step is a lesson.

A step runs the model on dozens of short paths, and its prediction after each of them is an answer to the question
"what comes after these tokens?", whether the path was accepted or not. The answers are kept by the last one, two, ...
tokens of the path. Token recycling (arXiv 2408.08696) keeps them by the last token alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lookahead.core.compiled import inner
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.errors import InvalidArgumentError

WAYS = 4
"""Entries in a set: the places where one context may be kept."""

LEAST_PROBABILITY = 1e-4
"""Smallest probability that is distinguished from zero."""

_UNLISTED = 0.3
"""What a token that is not listed is taken to have of the probability of the last one that is."""

OLD_SHARE = 0.7
"""What the frequency of a token that was seen to follow keeps of itself each time; one that followed once counts the
rest: another may follow the next time."""

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

WRITTEN = np.dtype([("token", np.int64), ("share", np.float64), ("log", np.float32)])
"""Room for a token of an entry that is written: its probability, and the logarithm of what the model said."""


class Entries(NamedTuple):
    """The arrays of `NGramMemory`: each context length has its own sets of `WAYS` places.

    Attributes:
        heads: `ENTRY`s, `[orders, sets * WAYS]`.
        followers: The next tokens of each, likeliest first, `FOLLOWER`s, `[orders, sets * WAYS, top_k]`.
        evidence: How many drafted tokens were accepted lately, and how many should have been by their probabilities, by
            kind of evidence: the class of the match that they followed, from 1, and the length of the longest context
            after which the memory named them; 0 for none, `[9, orders + 1, 2]`.
    """

    heads: NDArray[Any]
    followers: NDArray[Any]
    evidence: NDArray[np.float64]


class Writing(NamedTuple):
    """How entries are written, and room for one of them.

    Attributes:
        old_share: What a blended entry keeps of what it was.
        blended: Entries of contexts of up to so many tokens are blended with what was there.
        first_log: Added to the logarithms of a new entry.
        room: `WRITTEN`s, those of both predictions while they are blended, `[2 * top_k]`.
    """

    old_share: float
    blended: int
    first_log: float
    room: NDArray[Any]


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
    sets, first, second = entries.heads.shape[1] // WAYS, 1, 1
    for order in range(min(len(slots), size)):
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        tag, slot = (first << 31 | second) + 1, (first & (sets - 1)) * WAYS
        slots[order] = -1
        for place in range(slot, slot + WAYS):
            if entries.heads[order, place]["tag"] == tag:
                slots[order] = place
                break
        if slots[order] < 0:
            return order
    return min(len(slots), size)


@inner
def _take_logs(wide: int, probabilities: NDArray[np.float32], room: NDArray[Any]) -> np.float32:
    """Write the logarithms of the first `wide` probabilities to `room`; returns that of a token that is not listed."""
    total = 0.0
    for rank in range(wide):
        total += probabilities[rank]
        room[rank]["log"] = log(max(float(probabilities[rank]), LEAST_PROBABILITY))
    rest = min(float(probabilities[wide - 1]), 1 - total) * _UNLISTED
    unlisted: np.float32 = np.float32(log(max(rest, LEAST_PROBABILITY)))
    return unlisted


@inner
def _blend(
    head: Any, followers: NDArray[Any], wide: int, ids: NDArray[np.int64], floor: np.float32, writing: Writing
) -> None:
    """Update a stored prediction as a moving average with weight `old_share` on the old one."""
    old_share, _, _, room = writing
    count = 0
    for rank in range(wide):
        room[count]["token"], room[count]["share"] = ids[rank], (1 - old_share) * exp(float(room[rank]["log"]))
        count += 1
    for rank in range(len(followers)):
        token = int(followers[rank]["token"])
        if token < 0:
            break
        place = 0
        while place < count and room[place]["token"] != token:
            place += 1
        if place == count:
            room[count]["token"], room[count]["share"] = token, 0.0
            count += 1
        room[place]["share"] += old_share * exp(float(followers[rank]["log"]))
    for rank in range(min(len(followers), count)):
        best = rank
        for place in range(rank + 1, count):
            best = place if room[place]["share"] > room[best]["share"] else best
        token, share = room[best]["token"], room[best]["share"]
        room[best]["token"], room[best]["share"] = room[rank]["token"], room[rank]["share"]
        followers[rank]["token"], followers[rank]["log"] = token, log(max(share, LEAST_PROBABILITY))
    mixed = (1 - old_share) * exp(float(floor)) + old_share * exp(float(head["floor"]))
    head["floor"] = log(max(mixed, LEAST_PROBABILITY))


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
    sets, top_k, wide = entries.heads.shape[1] // WAYS, entries.followers.shape[2], 0
    while wide < min(top_k, len(ids)) and ids[wide] >= 0:
        wide += 1
    if wide == 0:
        return
    floor = _take_logs(wide, probabilities, writing.room)
    first = second = 1
    for order in range(len(context)):
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        tag = (first << 31 | second) + 1
        slot = _place_for(tag, (first & (sets - 1)) * WAYS, entries.heads[order])
        head, followers = entries.heads[order, slot], entries.followers[order, slot]
        head["stamp"] = clock
        if order < writing.blended and writing.old_share > 0 and head["tag"] == tag:
            _blend(head, followers, wide, ids, floor, writing)
            continue
        head["tag"], head["floor"] = tag, floor
        for rank in range(top_k):
            followers[rank]["token"] = ids[rank] if rank < wide else -1
            followers[rank]["log"] = writing.room[rank]["log"] + writing.first_log


ORDERS, CAPACITY = 4, 1 << 15
"""Context lengths of a memory, and contexts of each, if nothing else is asked for."""


class DamagedFileError(ValueError):
    """A file is of no use; the message says what it is, but not which file that is."""


NO_MEMORY = "is no saved memory"


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
        writing: How they write them.
        clock: How often something was inserted, here or in what this memory came from; it dates the entries.

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
        blended, first_log = (orders, log(1 - old_share)) if observed else (1, 0.0)
        self.writing = Writing(float(old_share), blended, first_log, np.zeros(2 * top_k, dtype=WRITTEN))

    def clear(self) -> None:
        """Forget everything. Takes far less time than arrays of another one, whose pages the system has to fill."""
        if self.clock:
            self.entries.heads.view(np.uint8).fill(0)  # numpy fills records one by one
            self.clock = 0
        self.entries.evidence.fill(EVIDENCE_PRIOR)

    def occupy(self) -> None:
        """Have the system fill all pages now, rather than one by one when they are first written to."""
        if not self.clock:
            self.entries.heads.view(np.uint8).fill(0)
            self.entries.followers.view(np.uint8).fill(0)

    def tick(self) -> int:
        """The time of what is inserted next."""
        self.clock += 1
        return self.clock

    def slots(self, context: Sequence[int]) -> list[int]:
        """Where the last 1, 2, ... tokens of a path are kept, up to a length that is not; the very last token first."""
        slots: list[int] = []
        first = second = 1
        for heads, token in zip(self.entries.heads, context, strict=False):
            first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
            second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
            begin = (first & (self.capacity // WAYS - 1)) * WAYS
            found = np.flatnonzero(heads["tag"][begin : begin + WAYS] == (first << 31 | second) + 1)
            if not len(found):
                break
            slots.append(begin + int(found[0]))
        return slots

    def statistics(self) -> dict[str, Any]:
        """How many contexts of each length are kept, how many fit, and the size of the arrays in bytes."""
        heads, followers, _ = self.entries
        entries = np.count_nonzero(heads["tag"], axis=1).tolist()
        return {"entries": entries, "capacity": self.capacity, "bytes": heads.nbytes + followers.nbytes}

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that is kept, as arrays by name, for a file."""
        heads, followers = self.entries.heads.reshape(-1), self.entries.followers.reshape(-1, self.top_k)
        used = np.flatnonzero(heads["tag"])
        return {
            "ngram_sizes": np.array([self.orders, self.capacity, self.top_k, self.clock], dtype=np.int64),
            "ngram_old_share": np.array(self.old_share),
            "ngram_slots": used.astype(np.int64),
            "ngram_tags": heads["tag"][used],
            "ngram_stamps": heads["stamp"][used],
            "ngram_ids": followers["token"][used],
            "ngram_logs": followers["log"][used],
            "ngram_floors": heads["floor"][used],
            "ngram_evidence": self.entries.evidence.copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> NGramMemory:
        """The memory that `to_arrays` gave.

        Raises:
            DamagedFileError: An array is missing, or they cannot be from there.
            Exception: There cannot be a memory of these sizes.
        """
        orders, capacity, top_k, clock = expect(arrays, "ngram_sizes", np.int64, (4,)).tolist()
        memory = cls(orders, capacity, top_k, float(expect(arrays, "ngram_old_share", np.float64, ())))
        heads, followers = memory.entries.heads.reshape(-1), memory.entries.followers.reshape(-1, top_k)
        slots = expect(arrays, "ngram_slots", np.int64, (None,))
        count = len(slots)
        stamps = expect(arrays, "ngram_stamps", np.uint32, (count,))
        if memory.capacity != capacity or stamps.max(initial=0) > clock or slots.min(initial=0) < 0:
            raise DamagedFileError(f"{NO_MEMORY}: its arrays do not belong together")
        memory.clock = clock
        heads["tag"][slots], heads["stamp"][slots] = expect(arrays, "ngram_tags", np.int64, (count,)), stamps
        heads["floor"][slots] = expect(arrays, "ngram_floors", np.float32, (count,))
        followers["token"][slots] = expect(arrays, "ngram_ids", np.int32, (count, top_k))
        followers["log"][slots] = expect(arrays, "ngram_logs", np.float32, (count, top_k))
        if "ngram_evidence" in arrays:  # older files have none
            evidence = expect(arrays, "ngram_evidence", np.float64, memory.entries.evidence.shape)
            memory.entries.evidence[:] = np.maximum(evidence, EVIDENCE_PRIOR / 2)
        return memory

    def merge(self, other: NGramMemory) -> None:
        """Take in the entries of another memory, which stays as it is.

        Of one context the newest entry stays, and in a full set the newest ones.

        Raises:
            InvalidArgumentError: The sizes differ.
        """
        if (self.orders, self.capacity, self.top_k) != (other.orders, other.capacity, other.top_k):
            raise InvalidArgumentError(
                f"a memory of orders={other.orders}, capacity={other.capacity}, top_k={other.top_k} cannot be merged "
                f"into one of orders={self.orders}, capacity={self.capacity}, top_k={self.top_k}; use equal sizes"
            )
        self.clock = max(self.clock, other.clock)
        heads, followers = (
            np.concatenate([one.reshape(-1, WAYS, *one.shape[2:]), two.reshape(-1, WAYS, *two.shape[2:])], axis=1)
            for one, two in zip(self.entries[:2], other.entries[:2], strict=True)
        )  # of each set both sides, `[sets, 2 * ways, ...]`
        tags, stamps = heads["tag"], np.where(heads["tag"], heads["stamp"].astype(np.int64), -1)
        same = (tags[:, :WAYS, None] == tags[:, None, WAYS:]) & (tags[:, :WAYS, None] != 0)
        newer = stamps[:, None, WAYS:] > stamps[:, :WAYS, None]
        stamps[:, :WAYS][(same & newer).any(axis=2)] = -1
        stamps[:, WAYS:][(same & ~newer).any(axis=1)] = -1
        tags[stamps < 0] = 0
        kept = np.sort(np.argsort(-stamps, axis=1, kind="stable")[:, :WAYS], axis=1)
        self.entries.heads[:] = np.take_along_axis(heads, kept, 1).reshape(self.entries.heads.shape)
        taken = np.take_along_axis(followers, kept[:, :, None], 1)
        self.entries.followers[:] = taken.reshape(self.entries.followers.shape)
        self.entries.evidence[:] = (self.entries.evidence + other.entries.evidence) / 2


def expect(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: DTypeLike, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """The array called `name`.

    Args:
        arrays: Where it is.
        name: What it is called.
        dtype: Its type; numbers of a floating one must be finite.
        shape: Its shape; `None` stands for any size.

    Raises:
        DamagedFileError: It is not there, or another one.
    """
    if name not in arrays:
        raise DamagedFileError(f"{NO_MEMORY}: it lacks the array {name!r}")
    array = arrays[name]
    sizes = tuple(size if want is None else want for size, want in zip(array.shape, shape, strict=False))
    if array.dtype != np.dtype(dtype) or array.ndim != len(shape) or array.shape != sizes:
        raise DamagedFileError(f"{NO_MEMORY}: its array {name!r} is a {array.dtype} of shape {list(array.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DamagedFileError(f"{NO_MEMORY}: its array {name!r} holds numbers that are not finite")
    return array
