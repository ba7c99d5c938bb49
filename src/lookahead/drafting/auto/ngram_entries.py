"""The entries of the n-gram memory: the hash table as arrays, and the compiled loops that read and write it."""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.proposals import Proposals, proposal_of, set_default

WAYS = 4
"""Entries in a set: the places where one context may be kept."""

LEAST_LOG_PROBABILITY = -9.2
"""Smallest log-probability that is distinguished from zero (one in 10,000)."""

LEAST_PROBABILITY = 1e-30
"""What is kept of a probability of zero, which has no logarithm."""

_UNLISTED = 0.3
"""What a token that is not listed is taken to have of the probability of the last one that is."""

FIRST_PRIME, SECOND_PRIME = 2147483647, 2147483629
FIRST_FACTOR, SECOND_FACTOR = 1103515245, 1664525
"""Two polynomial hashes of 31 bits each; products stay below 2^62, so compiled and interpreted sums agree."""


class Entries(NamedTuple):
    """The arrays of `NGramMemory`, one row for each entry.

    Attributes:
        tags: Hash of the context, `[entries]`; 0 where nothing is kept.
        stamps: When it was written, `[entries]`.
        ids: The next tokens, likeliest first, `[entries, top_k]`; -1 where there are no more.
        logs: Natural logarithm of their probabilities, `[entries, top_k]`.
        floors: The same for a token that is not among them, `[entries]`.
        lookups, hits: How often contexts of each length were looked up and found, `[orders]`.
        sets: Sets of each context length; a power of two.
    """

    tags: NDArray[np.int64]
    stamps: NDArray[np.uint32]
    ids: NDArray[np.int32]
    logs: NDArray[np.float32]
    floors: NDArray[np.float32]
    lookups: NDArray[np.int64]
    hits: NDArray[np.int64]
    sets: int


class Predictions(NamedTuple):
    """What the model predicts after some contexts: the likeliest tokens, likeliest first, and their probabilities,
    `[contexts, listed]` both."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


class WritingRoom(NamedTuple):
    """Room for what is written of one context: logarithms of probabilities, the last one that of a token that is not
    listed, `[top_k + 1]`; and for blending, tokens and shares, `[2 * top_k]`."""

    logs: NDArray[np.float32]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]


@inner
def entry_of(first: int, second: int, order: int, entries: Entries) -> int:
    """Where the context with these two hashes is kept, of `order + 1` tokens; -1 if it is not."""
    tag = (first << 31 | second) + 1
    begin = (order * entries.sets + (first & (entries.sets - 1))) * WAYS
    for place in range(begin, begin + WAYS):
        if entries.tags[place] == tag:
            return place
    return -1


@inner
def entry_after(token: int, entries: Entries) -> int:
    """Where the context of this token alone is kept; -1 if it is not."""
    return entry_of((FIRST_FACTOR + token + 1) % FIRST_PRIME, (SECOND_FACTOR + token + 1) % SECOND_PRIME, 0, entries)


@inner
def propose_known(
    node: int, context: NDArray[np.int64], size: int, proposals: Proposals, entries: Entries, column: int
) -> int:
    """Propose what the memory expects after the last 1, 2, ... tokens of a path; each length is a feature.

    Args:
        node: The node at the end of the path.
        context: Its last tokens, the very last one first; `size` of them count.
        size: See there.
        proposals: Get what may follow.
        entries: The memory.
        column: The feature of contexts of one token; those of longer ones come behind it.

    Returns:
        Length of the longest context that is known; 0 if none is.
    """
    first = second = 1
    longest = 0
    for order in range(min(len(entries.lookups), size)):
        token = context[order]
        first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
        second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
        slot = entry_of(first, second, order, entries)
        entries.lookups[order] += 1
        if slot < 0:
            continue
        entries.hits[order] += 1
        longest = order + 1
        set_default(column + order, max(entries.floors[slot], LEAST_LOG_PROBABILITY), proposals)
        for rank in range(entries.ids.shape[1]):
            follower = int(entries.ids[slot, rank])  # one type for all tokens, or `proposal_of` is compiled for two
            if follower < 0:
                break
            row = proposal_of(follower, node, proposals)
            proposals.features[row, column + order] = max(entries.logs[slot, rank], LEAST_LOG_PROBABILITY)
            proposals.orders[row] = order + 1
    return longest


@inner
def _take_logs(row: int, wide: int, new: Predictions, logs: NDArray[np.float32]) -> None:
    """Write the logarithms of the first `wide` probabilities of a row, and of one that is not listed, to `logs`."""
    total = 0.0
    for rank in range(wide):
        total += new.probabilities[row, rank]
        logs[rank] = log(max(float(new.probabilities[row, rank]), LEAST_PROBABILITY))
    rest = min(float(new.probabilities[row, wide - 1]), 1 - total) * _UNLISTED
    logs[len(logs) - 1] = log(max(rest, LEAST_PROBABILITY))


@inner
def _blend(
    slot: int, row: int, wide: int, new: Predictions, entries: Entries, old_share: float, room: WritingRoom
) -> None:
    """Mix a new prediction into the one that is kept, of which `old_share` stays."""
    top_k = entries.ids.shape[1]
    tokens, shares = room.tokens, room.shares
    count = 0
    for rank in range(wide):
        tokens[count] = new.ids[row, rank]
        shares[count] = (1 - old_share) * exp(float(room.logs[rank]))
        count += 1
    for rank in range(top_k):
        token = entries.ids[slot, rank]
        if token < 0:
            break
        place = 0
        while place < count and tokens[place] != token:
            place += 1
        if place == count:
            tokens[count] = token
            shares[count] = 0.0
            count += 1
        shares[place] += old_share * exp(float(entries.logs[slot, rank]))
    for rank in range(min(top_k, count)):
        best = rank
        for place in range(rank + 1, count):
            if shares[place] > shares[best]:
                best = place
        token, share = tokens[best], shares[best]
        tokens[best], shares[best] = tokens[rank], shares[rank]
        entries.ids[slot, rank] = token
        entries.logs[slot, rank] = log(max(share, LEAST_PROBABILITY))
    floor = (1 - old_share) * exp(float(room.logs[len(room.logs) - 1])) + old_share * exp(float(entries.floors[slot]))
    entries.floors[slot] = log(max(floor, LEAST_PROBABILITY))


@inner
def _place_for(tag: int, begin: int, entries: Entries) -> int:
    """Place for this context in the set that begins at `begin`: its old one, else an empty one, else the oldest."""
    slot, age = begin, int(entries.stamps[begin])
    for place in range(begin, begin + WAYS):
        if entries.tags[place] == tag:
            return place
        own_age = -1 if entries.tags[place] == 0 else int(entries.stamps[place])
        if own_age < age:
            slot, age = place, own_age
    return slot


@compiled
def write_entries(
    contexts: NDArray[np.int64],
    rows: NDArray[np.int64],
    clock: int,
    new: Predictions,
    entries: Entries,
    old_share: float,
    blended: int,
    first_log: float,
    room: WritingRoom,
) -> None:
    """Write what is predicted after contexts, for each length of them, in the order of `rows`.

    Entries of contexts of up to `blended` tokens are blended with what was there; `first_log` is added to the
    logarithms of a new entry.
    """
    top_k = entries.ids.shape[1]
    wide = min(top_k, new.ids.shape[1])
    for row in rows:
        _take_logs(row, wide, new, room.logs)
        first = second = 1
        for order in range(contexts.shape[1]):
            token = contexts[row, order]
            if token < 0:
                break
            first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
            second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
            tag = (first << 31 | second) + 1
            slot = _place_for(tag, (order * entries.sets + (first & (entries.sets - 1))) * WAYS, entries)
            entries.stamps[slot] = clock
            if order < blended and old_share > 0 and entries.tags[slot] == tag:
                _blend(slot, row, wide, new, entries, old_share, room)
                continue
            entries.tags[slot] = tag
            for rank in range(top_k):
                entries.ids[slot, rank] = new.ids[row, rank] if rank < wide else -1
            for rank in range(wide):
                entries.logs[slot, rank] = room.logs[rank] + first_log
            entries.floors[slot] = room.logs[top_k]


@compiled
def hash_contexts(contexts: NDArray[np.int64], hashed: NDArray[np.int64]) -> None:
    """`NGramMemory.hashes`, one context after another."""
    for row in range(contexts.shape[0]):
        first = second = 1
        for column in range(contexts.shape[1]):
            token = contexts[row, column]
            if token < 0:
                break
            first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
            second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
            hashed[row, column] = (first << 31 | second) + 1
