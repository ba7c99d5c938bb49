"""Compilation of the loops for drafting before the first step that needs them."""

from __future__ import annotations

from functools import cache

import numpy as np

from lookahead.core.compiled import note_all_kept
from lookahead.core.forest import Forest
from lookahead.core.garbage import uncollected
from lookahead.core.likeliest import BLOCK, list_likeliest, list_likeliest_bits
from lookahead.core.pace import Pace
from lookahead.core.packed_masks import packed_width, write_masks
from lookahead.core.results import StepResult
from lookahead.core.step_costs import StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import compile_walk
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter


@cache
def compile_loops() -> None:
    """Run each compiled loop of `preset="auto"` once, on arrays of the types used in decoding.

    Takes seconds if numba's cache is empty. Later calls return at once.
    """
    room = np.empty(1, dtype=np.float32), np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float32)
    listed = np.empty((1, 1), dtype=np.int64), np.empty((1, 1), dtype=np.float32)
    # numba makes many objects, and each garbage collection visits all of torch's objects: a fifth of the time.
    with uncollected():
        list_likeliest(np.zeros((1, BLOCK), dtype=np.float32), *room, *listed)
        list_likeliest_bits(np.zeros((1, BLOCK), dtype=np.int16), np.empty(BLOCK, dtype=np.float32), *room, *listed)
        pace = Pace(StepCosts())
        pace.choose(np.ones(1), resends=True)
        pace.book(StepTime(nodes=2, context=1, seconds=1.0, tokens=2, rows=1, drafted=True))
        _draft()
    note_all_kept()


def _draft() -> None:
    """Run one step, followed by a forced token."""
    drafter = AutoDrafter(DraftMemory(16, 2, 4), 8)
    drafter.start([0, 1, 2])
    tree = TokenTree([2])
    drafter.propose(tree)
    tree.add_candidates([0])
    forest = Forest([tree])
    forest.ancestors(1, len(tree))
    compile_walk(forest)
    mask = np.empty((len(tree), packed_width(len(tree))), dtype=np.int32)
    write_masks(forest.firsts, forest.parent_slots, forest.roots, forest.depths, 0, 0, mask)
    top_ids = np.tile(np.arange(drafter.top_k), (len(tree), 1))  # [nodes, top_k] int64
    top_probabilities = np.full(top_ids.shape, 0.1, dtype=np.float32)
    drafter.observe(StepResult(tree, top_ids[:, 0], [], [0], top_ids, top_probabilities))
