"""Chains: the best path of a tree, how much of it is sent, and what its drafter learns."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from lookahead import LookaheadConfig, UnsupportedArgumentError
from lookahead.core.pace import Pace, PacedRow
from lookahead.core.protocols import StepResult
from lookahead.core.shared_pace import SharedPace, SharedRow
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import build_chain_drafter
from lookahead.drafting.chain import ChainDrafter


class Proposer:
    """Adds given nodes, a parent and a probability for each, and keeps what it is told."""

    top_k = 3

    def __init__(self, parents: Sequence[int], probabilities: Sequence[float]) -> None:
        self._parents = parents
        self.path_probabilities = np.array(probabilities)
        self.told: list[StepResult] = []

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, tree: TokenTree) -> None:
        for number, parent in enumerate(self._parents):
            tree.add_candidates([100 + number], tree.root + parent)

    def observe(self, result: StepResult) -> None:
        self.told.append(result)

    def statistics(self) -> dict[str, Any]:
        return {}


def random_tree(random: Random) -> tuple[list[int], list[float]]:
    parents, probabilities = [], [1.0]
    for node in range(1, random.randint(2, 12)):
        parents.append(random.randrange(node))
        probabilities.append(probabilities[parents[-1]] * random.random())
    return parents, probabilities[1:]


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The path to each node, the root left out."""
    found: list[list[int]] = [[]]
    for number, parent in enumerate(parents):
        found.append([*found[parent], number])
    return found[1:]


@pytest.mark.parametrize("seed", range(30))
def test_the_path_with_the_most_expected_tokens_is_sent(seed: int) -> None:
    parents, probabilities = random_tree(Random(seed))
    drafter = ChainDrafter(Proposer(parents, probabilities), 20)
    drafter.start([1, 2])
    tree = TokenTree([2, 3])
    drafter.propose(tree)
    assert tree.parents == list(range(-1, len(tree) - 1))
    best = max(sum(probabilities[node] for node in path) for path in paths(parents))
    assert sum(probabilities[token - 100] for token in tree.tokens[2:]) == pytest.approx(best)


def test_no_more_nodes_are_sent_than_asked_for() -> None:
    drafter = ChainDrafter(Proposer([0, 1, 2, 3], [0.9, 0.8, 0.7, 0.6]), 3)
    drafter.start([1])
    tree = TokenTree([1, 5])
    drafter.propose(tree)
    assert tree.tokens == [1, 5, 100, 101]


def test_the_drafter_learns_of_what_was_sent_alone() -> None:
    proposer = Proposer([0, 0, 2], [0.5, 0.4, 0.3])  # 100, and 101 - 102
    drafter = ChainDrafter(proposer, 20)
    drafter.start([1])
    tree = TokenTree([7, 1])
    drafter.propose(tree)
    assert tree.tokens == [7, 1, 101, 102]
    predictions = np.array([-1, 101, 9, 10])
    top_ids, top_probabilities = predictions[:, None], np.array([[0], [0.9], [0.8], [0.7]], dtype=np.float32)
    drafter.observe(StepResult(tree, predictions, [2], [101, 9], top_ids, top_probabilities))
    (told,) = proposer.told
    assert told.tree.tokens == [7, 1, 100, 101, 102]
    assert told.predictions.tolist() == [-1, 101, -1, 9, 10]
    assert told.top_ids[:, 0].tolist() == [-1, 101, -1, 9, 10]
    assert told.top_probabilities[:, 0].tolist() == pytest.approx([0, 0.9, 0, 0.8, 0.7])
    assert told.path == [3]
    assert told.tokens == [101, 9]


def test_no_chain_is_more_than_twice_as_large_as_one_that_was_run() -> None:
    pace = Pace(StepCosts(1 + 0.001 * GRID))
    sure, sent = np.ones(60), list[int]()
    row = PacedRow(pace, resends=True)
    for pending in (3, 12):
        row.begin()
        row.offer(sure, sent.append, pending)
    for nodes in (8, 16):
        pace.book(StepTime(1, 100, 1.0, 1, 1, drafted=False))
        pace.book(StepTime(nodes, 100, 1.0, nodes, 1, drafted=True))
        row.begin()
        row.offer(sure, sent.append, 3)
    assert sent == [5, 0, 13, 29]


def test_the_paper_needs_trees() -> None:
    with pytest.raises(UnsupportedArgumentError, match="preset='paper'"):
        build_chain_drafter(LookaheadConfig(preset="paper"))


def test_a_budget_shared_with_others_cuts_chains() -> None:
    shared = SharedPace(lambda rows, temperature: Pace(StepCosts(), rows), nodes=5)
    drafters = [
        ChainDrafter(Proposer([0, 1, 2, 3], likely), SharedRow(shared)) for likely in ([0.9, 0.8, 0.7, 0.6], [0.5] * 4)
    ]
    shared.begin(2)
    trees = [TokenTree([1]), TokenTree([2])]
    for drafter, tree in zip(drafters, trees, strict=True):
        drafter.start([tree.tokens[0]])
        drafter.propose(tree)
    shared.share_out(trees)
    assert [tree.tokens for tree in trees] == [[1, 100, 101, 102], [2]]
