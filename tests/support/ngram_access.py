"""Read and write single entries of a `DraftMemory` from Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled
from lookahead.drafting import DraftMemory
from lookahead.drafting.auto.ngrams import Entries, Writing, look_up, write_entry


@compiled
def _write(
    contexts: NDArray[np.int64],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    clock: int,
    entries: Entries,
    writing: Writing,
) -> None:
    for row in range(len(contexts)):
        size = 0
        while size < contexts.shape[1] and contexts[row, size] >= 0:
            size += 1
        write_entry(contexts[row, :size], ids[row], probabilities[row], clock, entries, writing)


@compiled
def _look_up(context: NDArray[np.int64], entries: Entries, slots: NDArray[np.int64]) -> int:
    size = 0
    while size < len(context) and context[size] >= 0:
        size += 1
    return look_up(context, size, entries, slots)


def insert(
    memory: DraftMemory, contexts: NDArray[np.int64], ids: NDArray[np.int64], probabilities: NDArray[np.float32]
) -> None:
    """Store predictions after contexts.

    Args:
        memory: The memory to write to.
        contexts: `[contexts, at most orders]`, the last token in column 0; -1 before the beginning of the text.
        ids, probabilities: The likeliest next tokens, likeliest first, `[contexts, listed]`.
    """
    contexts, ids = np.ascontiguousarray(contexts), np.ascontiguousarray(ids)
    memory.clock += 1
    _write(contexts, ids, probabilities, memory.clock, memory.entries, memory.writing)


def lookup(
    memory: DraftMemory, contexts: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]:
    """Return whether the context of each length is known, `[contexts, orders]`, and the next tokens, likeliest first
    and filled up with -1, and their probabilities, `[contexts, orders, top_k]` both."""
    is_known = np.zeros(contexts.shape, dtype=bool)
    ids = np.full((*contexts.shape, memory.top_k), -1, dtype=np.int32)
    shares = np.zeros(ids.shape, dtype=np.float32)
    slots = np.zeros(memory.orders, dtype=np.int64)
    for row, context in enumerate(np.ascontiguousarray(contexts)):
        known = _look_up(context, memory.entries, slots)
        for order, slot in enumerate(slots[:known].tolist()):
            followers = memory.entries.followers[order, slot]
            is_known[row, order], ids[row, order] = True, followers["token"]
            shares[row, order] = np.where(followers["token"] >= 0, np.exp(followers["log"]), 0)
    return is_known, ids, shares
