"""Token recycling by hand: its trees, and its learning."""

from __future__ import annotations

import numpy as np

from lookahead.core.token_tree import TokenTree
from lookahead.drafting import StepResult, TokenRecyclingDrafter


def show(drafter: TokenRecyclingDrafter, token: int, ids: list[int], probabilities: list[float]) -> None:
    """Observe a step of one token with the predictions `ids`."""
    drafter.observe(
        StepResult(
            TokenTree([token]),
            np.array([ids[0]]),
            path=[],
            tokens=[ids[0]],
            top_ids=np.array([ids]),
            top_probabilities=np.array([probabilities], dtype=np.float32),
        )
    )


def draft(drafter: TokenRecyclingDrafter, root: int, max_depth: int | None = None) -> list[tuple[int, int]]:
    """Return token and parent of each drafted node, in order."""
    tree = TokenTree([root], max_depth)
    drafter.propose(tree)
    return list(zip(tree.tokens, tree.parents, strict=True))[1:]


def test_it_draws_the_likeliest_tree_first() -> None:
    drafter = TokenRecyclingDrafter(budget=6)
    drafter.start([1])
    show(drafter, 1, [2, 3], [0.6, 0.3])
    show(drafter, 2, [3, 1], [0.7, 0.1])
    show(drafter, 3, [9, 2], [0.5, 0.2])
    # 2: .6, 2-3: .42, 3: .3, 2-3-9: .21, 3-9: .15
    assert draft(drafter, 1) == [(2, 0), (3, 1), (3, 0), (9, 2), (9, 3)]


def test_it_keeps_to_budget_and_room() -> None:
    for budget in (1, 2, 5):
        drafter = TokenRecyclingDrafter(budget)
        show(drafter, 1, [1, 2], [0.6, 0.3])
        show(drafter, 2, [1, 2], [0.6, 0.3])
        assert len(draft(drafter, 1)) == budget - 1
    assert [parent for _, parent in draft(drafter, 1, max_depth=1)] == [0, 0]
    assert draft(drafter, 1, max_depth=0) == []


def test_the_latest_prediction_counts() -> None:
    drafter = TokenRecyclingDrafter(budget=2)
    show(drafter, 1, [2], [0.9])
    show(drafter, 1, [3], [0.4])
    assert draft(drafter, 1) == [(3, 0)]
    assert draft(drafter, 7) == []
