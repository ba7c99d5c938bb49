"""N-gram memory: the model's predictions after short contexts, learned from every node of every step.

A step runs the model on dozens of short paths. Its prediction after each path is stored under the last one, two, ...
tokens of the path, whether the path was accepted or not. Token recycling (arXiv 2408.08696) uses only the last token.
"""

from __future__ import annotations

from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, inner

WAYS = 4
"""Entries per set: the number of slots that one context may be stored in."""

LEAST_PROBABILITY = 1e-4
"""Minimum stored probability; smaller ones are rounded up to it."""

_UNLISTED = 0.3
"""Estimated probability of an unlisted token, as a fraction of the last listed one."""

OLD_SHARE = 0.7
"""Weight of the old frequency of a following token in each update; a first occurrence counts 1 - `OLD_SHARE`."""

EVIDENCE_PRIOR = 20.0
"""Prior count of each kind of evidence, in tokens; the prior has no correction of probabilities."""

FIRST_PRIME = 2147483647
SECOND_PRIME = 2147483629
FIRST_FACTOR = 1103515245
SECOND_FACTOR = 1664525
"""Moduli and factors of two 31-bit polynomial hashes; products below 2^62 are equal in compiled and plain code."""

ENTRY = np.dtype(
    [
        ("tag", np.int64),  # hash of the context; 0 for an empty slot
        ("stamp", np.uint32),  # date of the last write
        ("floor", np.float32),  # estimated natural logarithm of the probability of an unlisted token
    ]
)
FOLLOWER = np.dtype([("token", np.int32), ("log", np.float32)])
"""A possible next token (-1 after the last one), and the natural logarithm of its probability."""

WRITTEN = np.dtype([("token", np.int64), ("share", np.float64), ("log", np.float32)])
"""Buffer for a token of the entry being written: its probability, and the logarithm of the model's prediction."""


class Entries(NamedTuple):
    """Arrays of `DraftMemory`: each context length has its own sets of `WAYS` slots.

    Attributes:
        heads: `ENTRY`s, `[orders, sets * WAYS]`.
        followers: Next tokens of each entry, likeliest first, `FOLLOWER`s, `[orders, sets * WAYS, top_k]`.
        evidence: Decayed numbers of accepted drafted tokens: actual, and expected by their probabilities,
            `[9, orders + 1, 2]`. The first index is the class of the context match, from 1; the second is the length
            of the longest context in the memory. Both are 0 for none.
    """

    heads: NDArray[Any]
    followers: NDArray[Any]
    evidence: NDArray[np.float64]


class Writing(NamedTuple):
    """Options and buffers for writing entries.

    Attributes:
        old_share: Weight of the old prediction in a blended entry.
        blended: Longest context with blending of new and old predictions, in tokens.
        first_log: Offset added to the logarithms of a new entry.
        room: Buffer for both predictions of a blend, `WRITTEN`s, `[2 * top_k]`.
        context: Buffer for the last tokens of a path, `[orders]`.
        tags: Buffer for the hashes of a path's contexts, `[orders]`.
        slots: Buffer for their slots, `[orders]`.
    """

    old_share: float
    blended: int
    first_log: float
    room: NDArray[Any]
    context: NDArray[np.int64]
    tags: NDArray[np.int64]
    slots: NDArray[np.int64]


@inner
def look_up(context: NDArray[np.int64], size: int, entries: Entries, slots: NDArray[np.int64]) -> int:
    """Find the contexts of the last 1, 2, ... tokens of a path, up to the first one that is not stored.

    Args:
        context: The last tokens of the path, the very last one first.
        size: Number of valid tokens in `context`.
        entries: The memory.
        slots: Output for the slot of each context.

    Returns:
        Number of contexts found.
    """
    sets = entries.heads.shape[1] // WAYS
    first = FIRST + 1
    second = FIRST + 1
    for order in range(min(len(slots), size)):
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        tag = (first << 31 | second) + 1
        slot = (first & (sets - 1)) * WAYS
        slots[order] = -1
        for place in range(slot, slot + WAYS):
            if entries.heads[order, place]["tag"] == tag:
                slots[order] = place
                break
        if slots[order] < 0:
            return order
    return min(len(slots), size)


@inner
def _blend(
    head: Any, followers: NDArray[Any], wide: int, ids: NDArray[np.int64], floor: np.float32, writing: Writing
) -> None:
    """Update a stored prediction as a moving average with weight `old_share` on the old one."""
    old_share = writing.old_share
    room = writing.room
    count = wide
    for rank in range(wide):
        new = room[rank]
        new["token"], new["share"] = ids[rank], (1 - old_share) * exp(float(new["log"]))
    for follower in followers:
        if follower["token"] < 0:
            break
        place = FIRST
        while place < count and room[place]["token"] != follower["token"]:
            place += 1
        old = room[place]
        if place == count:
            old["token"], old["share"] = follower["token"], 0.0
            count += 1
        old["share"] += old_share * exp(float(follower["log"]))
    for rank in range(min(len(followers), count)):
        first = best = room[rank]
        for place in range(rank + 1, count):
            if room[place]["share"] > best["share"]:
                best = room[place]
        follower = followers[rank]
        follower["token"], follower["log"] = best["token"], log(max(best["share"], LEAST_PROBABILITY))
        best["token"], best["share"] = first["token"], first["share"]
    mixed = (1 - old_share) * exp(float(floor)) + old_share * exp(float(head["floor"]))
    head["floor"] = log(max(mixed, LEAST_PROBABILITY))


@inner
def write_entry(
    context: NDArray[np.int64],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    clock: int,
    entries: Entries,
    writing: Writing,
) -> None:
    """Write a prediction to the memory under each length of its context.

    Args:
        context: Last tokens of the path, the very last one first, `[tokens]`.
        ids: The likeliest next tokens, likeliest first, `[listed]`; -1 after the last one.
        probabilities: Their probabilities, `[listed]`.
        clock: Date of the entries.
        entries: The memory.
        writing: Options and buffers.
    """
    sets = entries.heads.shape[1] // WAYS
    top_k = entries.followers.shape[2]
    wide = FIRST
    last = 0.0
    total = 0.0
    while wide < min(top_k, len(ids)) and ids[wide] >= 0:
        last = np.float64(probabilities[wide])
        total += last
        writing.room[wide]["log"] = log(max(last, LEAST_PROBABILITY))
        wide += 1
    if wide == 0:
        return
    floor = np.float32(log(max(min(last, 1 - total) * _UNLISTED, LEAST_PROBABILITY)))
    first = second = FIRST + 1
    for order in range(len(context)):  # find all slots first, so that the processor waits for memory once
        first = (first * FIRST_FACTOR + context[order] + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + context[order] + 1) % SECOND_PRIME
        tag = (first << 31 | second) + 1
        begin = (first & (sets - 1)) * WAYS
        slot = begin
        oldest = FIRST + (1 << 32)
        for place in range(begin, begin + WAYS):  # the slot of this context, else an empty one, else the oldest
            head = entries.heads[order, place]
            stamp = -2 if head["tag"] == tag else -1 if head["tag"] == 0 else np.int64(head["stamp"])
            if stamp < oldest:
                slot = place
                oldest = stamp
        writing.tags[order], writing.slots[order] = tag, slot
    for order in range(len(context)):
        tag = writing.tags[order]
        slot = writing.slots[order]
        head = entries.heads[order, slot]
        followers = entries.followers[order, slot]
        head["stamp"] = clock
        if order < writing.blended and writing.old_share > 0 and head["tag"] == tag:
            _blend(head, followers, wide, ids, floor, writing)
            continue
        head["tag"], head["floor"] = tag, floor
        for rank in range(top_k):
            follower = followers[rank]
            follower["token"] = ids[rank] if rank < wide else -1
            follower["log"] = writing.room[rank]["log"] + writing.first_log
