"""Proposals in the order of the probability of their paths: a binary heap in arrays."""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner

_POWERS = 64
"""Powers of two of probabilities that are distinguished."""


class PathQueue(NamedTuple):
    """The heap, the most probable path first.

    Attributes:
        rows: Numbers of the proposals, `[proposals]`.
        probabilities: Of their paths, by the number of the proposal, `[proposals]`.
        likely: How many were let in by the power of two of their probabilities.
        counts: How many proposals wait, how many `likely` counts, and the least likely power of use, `[3]`.
    """

    rows: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    likely: NDArray[np.int64]
    counts: NDArray[np.int64]


def allocate_queue(proposals: int) -> PathQueue:
    """Room for so many."""
    rows, likely, counts = (np.zeros(size, dtype=np.int64) for size in (proposals, _POWERS, 3))
    return PathQueue(rows, np.zeros(proposals), likely, counts)


@inner
def clear(queue: PathQueue) -> None:
    """Let nothing wait."""
    for power in range(len(queue.likely)):
        queue.likely[power] = 0
    queue.counts[0] = queue.counts[1] = 0
    queue.counts[2] = len(queue.likely) - 1


@inner
def is_useful(probability: float, most: int, queue: PathQueue) -> bool:
    """Whether a path may be among the `most` likeliest so far; they are counted by their powers of two."""
    likely, counts = queue.likely, queue.counts
    power = min(-frexp(probability)[1], len(likely) - 1)
    if power > counts[2]:
        return False
    likely[power] += 1
    counts[1] += 1
    while counts[2] > 0 and counts[1] - likely[counts[2]] >= most:
        counts[1] -= likely[counts[2]]
        counts[2] -= 1
    return True


@inner
def _comes_before(one: int, other: int, queue: PathQueue) -> bool:
    first, second = queue.probabilities[one], queue.probabilities[other]
    return bool(first > second or (first == second and one < other))


@inner
def push(row: int, probability: float, queue: PathQueue) -> None:
    """Let a proposal wait."""
    queue.probabilities[row] = probability
    at = queue.counts[0]
    queue.counts[0] = at + 1
    while at > 0 and _comes_before(row, queue.rows[(at - 1) >> 1], queue):
        queue.rows[at] = queue.rows[(at - 1) >> 1]
        at = (at - 1) >> 1
    queue.rows[at] = row


@inner
def pop(queue: PathQueue) -> int:
    """The proposal with the most probable path, which waits no longer; of equal ones the first."""
    best = int(queue.rows[0])
    count = queue.counts[0] - 1
    queue.counts[0] = count
    row = int(queue.rows[count])
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _comes_before(queue.rows[child + 1], queue.rows[child], queue):
            child += 1
        if not _comes_before(queue.rows[child], row, queue):
            break
        queue.rows[at] = queue.rows[child]
        at = child
    queue.rows[at] = row
    return best
