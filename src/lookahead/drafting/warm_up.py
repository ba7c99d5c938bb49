"""Compiling the inner loops of drafting before they are needed, so that no step has to wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from lookahead.core.likeliest import BLOCK, list_likeliest
from lookahead.core.protocols import StepResult
from lookahead.core.shared_pace import compile_shared_pace
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.ngrams import NGramMemory
from lookahead.drafting.auto.predicted_text import PredictedText

_NODES = 8
_STEPS = 2


@contextmanager
def _without_collecting() -> Iterator[None]:
    """No cyclic garbage is looked for: numba makes many objects, and each search goes through all of torch's, a fifth
    of the time that compiling takes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def compile_loops() -> None:
    """Run each compiled loop of `preset="auto"` once, on arrays of the types that decoding has.

    Takes seconds where numba finds no cache of what it compiled before. Later calls return at once.
    """
    with _without_collecting():
        _list_a_row()
        compile_shared_pace()
        memory = DraftMemory(NGramMemory(16, 2, 4))
        _draft(AutoDrafter(memory, _NODES))
        _insert(memory.ngrams)  # as where a processor forces a text of which the model predicts nothing


@cache
def compile_source_loops() -> None:
    """The same for those of texts with sources."""
    with _without_collecting():
        _draft(AutoDrafter(DraftMemory(NGramMemory(16, 2, 4)), _NODES, sources=[PredictedText([0, 1])]))


@cache
def compile_memory_loops() -> None:
    """The same for those of a `NGramMemory` alone."""
    with _without_collecting():
        memory = NGramMemory(1, 2, 4)
        _insert(memory)
        memory.lookup(np.zeros((1, 1), dtype=np.int64))


def _insert(memory: NGramMemory) -> None:
    contexts = np.zeros((1, 1), dtype=np.int64)
    memory.insert(contexts, contexts, np.ones((1, 1), dtype=np.float32))


def _draft(drafter: AutoDrafter) -> None:
    drafter.start([0, 1, 2])
    for step in range(_STEPS):
        tree = TokenTree([step])
        drafter.propose(tree)
        top_ids = np.tile(np.arange(drafter.top_k), (len(tree), 1))  # [nodes, top_k] int64
        top_probabilities = np.full(top_ids.shape, 0.1, dtype=np.float32)
        drafter.observe(StepResult(tree, top_ids[:, 0], [], [0], top_ids, top_probabilities))
        drafter._late = [0]


@cache
def compile_chain_loops() -> None:
    """The same for the loops of a `DraftBatch` of chains alone."""
    with _without_collecting():
        _list_a_row()
        _draft(AutoDrafter(DraftMemory(NGramMemory(16, 2, 4)), _NODES, chains=True))


def _list_a_row() -> None:
    room = np.empty(1, dtype=np.float32), np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float32)
    listed = np.empty((1, 1), dtype=np.int64), np.empty((1, 1), dtype=np.float32)
    list_likeliest(np.zeros((1, BLOCK), dtype=np.float32), *room, *listed)
