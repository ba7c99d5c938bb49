"""Predictions after a rejected sibling are drafted after the selected token."""

from __future__ import annotations

import numpy as np

from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, StepResult
from ngram_access import insert

TOP_K = 4


def test_continuations_of_rejected_siblings_are_drafted_after_the_selected_token() -> None:
    memory = DraftMemory(2, 64, TOP_K)
    insert(memory, np.array([[5, -1]]), np.array([[7]]), np.float32([[0.8]]))
    drafter = AutoDrafter(memory, 2, explore=False)
    drafter.start([5])
    tree = TokenTree([5])
    drafter.propose(tree)
    assert tree.tokens == [5, 7]
    # The model selects 8, not 7; after 7 it would have selected 9, or else 3.
    ids, shares = np.array([[8, 7], [9, 3]]), np.float32([[0.9, 0.1], [0.7, 0.2]])
    drafter.observe(StepResult(tree, ids[:, 0], [], [8], ids, shares))
    coming = TokenTree([8])
    drafter.propose(coming)
    assert coming.tokens == [8, 9]
