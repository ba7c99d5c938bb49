"""Chains: the likeliest path, its length, and learning from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from lookahead import LookaheadConfig, UnsupportedArgumentError
from lookahead.core.drafts import grouped, propose
from lookahead.core.pace import PLAIN_STEPS, Pace, PacedRow
from lookahead.core.results import StepResult
from lookahead.core.roots import Roots
from lookahead.core.sequence import SequenceState
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import TokenPaths, build_drafter
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.checked import CheckedDrafter, CheckedSource


class Listing:
    """A source that lists the same paths in each step, and forbids some tokens."""

    name = "listing"

    def __init__(self, paths: TokenPaths, forbidden: Sequence[int] = ()) -> None:
        self._paths, self._forbidden = paths, forbidden

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self) -> TokenPaths:
        return self._paths

    def observe(self, result: StepResult) -> None: ...

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        return [token not in self._forbidden for token in tokens]


class Proposer:
    """A drafter that adds nodes after fixed parents, and records the results of steps."""

    top_k = 3

    def __init__(self, parents: Sequence[int]) -> None:
        self._parents = parents
        self.results: list[StepResult] = []

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, tree: TokenTree) -> None:
        for number, parent in enumerate(self._parents):
            tree.add_candidates([100 + number], tree.root + parent)

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def statistics(self) -> dict[str, Any]:
        return {}


def test_the_first_path_is_sent() -> None:
    parents = [0, 0, 1, 2, 3, 3]  # 100 - 102 - 104, and later nodes
    drafter = CheckedDrafter(lambda: Proposer(parents), 64, chain=20)
    drafter.start([1, 2])
    tree = TokenTree([2, 3])
    drafter.propose(tree)
    assert (tree.tokens, tree.parents) == ([2, 3, 100, 102, 104], [-1, 0, 1, 2, 3])


def test_no_more_nodes_are_sent_than_requested() -> None:
    drafter = CheckedDrafter(lambda: Proposer([0, 1, 2, 3]), 64, chain=3)
    drafter.start([1])
    tree = TokenTree([1, 5])
    drafter.propose(tree)
    assert tree.tokens == [1, 5, 100, 101]


def test_the_drafter_only_learns_from_sent_nodes() -> None:
    proposer = Proposer([0, 0, 1])  # 100 - 102, and 101
    drafter = CheckedDrafter(lambda: proposer, 64, chain=20)
    drafter.start([1])
    tree = TokenTree([7, 1])
    drafter.propose(tree)
    assert (tree.tokens, tree.parents, tree.depths) == ([7, 1, 100, 102], [-1, 0, 1, 2], [0, 1, 2, 3])
    assert tree.needs_logits == [False, True, True, True]
    assert [tree.child(1, 100), tree.child(2, 102), tree.child(1, 101)] == [2, 3, None]
    result = StepResult(tree, np.array([-1, 100, 9, 10]), [2], [100, 9])
    drafter.observe(result)
    assert proposer.results == [result]


def test_token_recycling_chains_the_likeliest_tokens() -> None:
    drafter = build_drafter(LookaheadConfig(preset="token_recycling", step_budget=4), chains=True)
    ids, shares = np.array([[2, 3], [3, 1]]), np.array([[0.6, 0.3], [0.2, 0.1]], dtype=np.float32)
    drafter.observe(StepResult(TokenTree([1, 2]), ids[:, 0], [], [3], ids, shares))
    drafter.propose(tree := TokenTree([1]))
    assert (tree.tokens, tree.parents) == ([1, 2, 3], [-1, 0, 1])


def test_no_chain_is_more_than_twice_as_large_as_one_that_was_run() -> None:
    pace = Pace(StepCosts(1 + 0.001 * GRID))
    sure, sent = np.ones(60), list[int]()
    row = PacedRow(pace, resends=True)
    for pending in (3, 12):
        row.begin()
        sent.append(int(row.choose(sure, np.array([len(sure)]), Roots([TokenTree(range(pending))]), [0])[0]))
    for nodes in (8, 16):
        pace.book(StepTime(nodes, 100, 1.0, nodes, 1, drafted=True))
        for _ in range(PLAIN_STEPS):
            pace.book(StepTime(1, 100, 1.0, 1, 1, drafted=False))
        row.begin()
        sent.append(int(row.choose(sure, np.array([len(sure)]), Roots([TokenTree(range(3))]), [0])[0]))
    assert sent == [5, 0, 13, 29]


def test_the_paper_needs_trees() -> None:
    with pytest.raises(UnsupportedArgumentError, match="preset='paper'"):
        build_drafter(LookaheadConfig(preset="paper"), chains=True)


def test_a_budget_shared_with_others_cuts_chains() -> None:
    shared = SharedPace(lambda rows, temperature: Pace(StepCosts(), rows), nodes=5)
    sure = [CheckedSource(Listing(TokenPaths.chain([1, 2, 3, 4], likely))) for likely in (0.9, 0.3)]
    drafters = [AutoDrafter(None, shared, sources=[source], chains=True) for source in sure]
    shared.begin_step(2)
    texts = [
        SequenceState([token], drafter, cast(Any, None), bool) for token, drafter in zip((5, 6), drafters, strict=True)
    ]
    roots = Roots([None, None], [5, 6], lambda: [9, 9])
    propose(texts, roots, grouped(texts, range(2)))
    assert [tree.tokens for tree in roots.forest()] == [[5, 1, 2, 3], [6]]


@pytest.mark.parametrize("chains", [False, True])
def test_a_chain_takes_another_path_where_the_likeliest_is_forbidden(chains: bool) -> None:
    paths = TokenPaths([1, 2, 3, 4, 5], [-1, -1, 0, 1, 3], [0.6, 0.3, 0.9, 0.9, 0.9])  # 1 - 3, and 2 - 4 - 5
    source = Listing(paths, forbidden=[1])
    drafter = AutoDrafter(None, 8, sources=[CheckedSource(source)], chains=chains)
    drafter.start([9])
    drafter.propose(tree := TokenTree([9]))
    assert (tree.tokens, tree.parents) == ([9, 2, 4, 5], [-1, 0, 1, 2])
