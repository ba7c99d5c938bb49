"""Which nodes of which rows a step sends."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import DraftAccount, StepTime
from lookahead.core.shared_budget import SharedBudget
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError


def accounts(fixed: float, per_node: float) -> Callable[[int, float], DraftAccount]:
    """Gives accounts of loads at which a step takes `fixed` seconds and `per_node` for each node."""
    points = [(nodes, 1, fixed + per_node * nodes) for nodes in (1, 2, 4, 8, 16, 32, 64, 128)]
    return cache(lambda load, temperature: DraftAccount(CostModel.fit(points), load, adaptive=False))


def chosen(budget: SharedBudget, offers: list[list[float]]) -> list[int]:
    """How many candidates of each row are sent."""
    budget.begin(len(offers))
    sent = [0] * len(offers)
    for index, probabilities in enumerate(offers):
        row = budget.row()
        row.begin()
        row.offer(np.array(probabilities), 10)
        row.when_chosen(lambda count, index=index: sent.__setitem__(index, count))
    budget.share_out([TokenTree([1]) for _ in offers])
    return sent


def test_rows_compete_by_probability() -> None:
    budget = SharedBudget(accounts(1, 0), nodes=8)
    assert chosen(budget, [[0.9, 0.8, 0.7, 0.6], [0.5, 0.1], [0.75, 0.05]]) == [4, 0, 1]
    assert chosen(budget, [[0.9], [0.8]]) == [1, 1]
    budget.begin(8)
    assert budget.backs_off


def test_as_many_are_sent_as_pay() -> None:
    random = np.random.default_rng(0)
    for fixed, per_node in ((1.0, 0.01), (1.0, 0.1), (0.1, 1.0)):
        offers = [sorted(random.random(6), reverse=True) for _ in range(4)]
        sent = chosen(SharedBudget(accounts(fixed, per_node)), offers)

        def rate(counts: list[int], offers: list[list[float]] = offers, cost: tuple = (fixed, per_node)) -> float:
            tokens = 4 + sum(sum(own[:count]) for own, count in zip(offers, counts, strict=True))
            return tokens / (cost[0] + cost[1] * (4 + sum(counts)))

        for row in range(4):
            for change in (-1, 1):
                other = [count + change * (index == row) for index, count in enumerate(sent)]
                if 0 <= other[row] <= 6:
                    assert rate(sent) >= rate(other) * 0.97  # the search is paid for already
    assert sum(sent) <= 1


def test_each_load_has_an_account_of_its_own() -> None:
    loads = accounts(1, 0.01)
    budget = SharedBudget(loads)
    for _ in range(200):
        budget.begin(7)
        budget.book(StepTime(64, 10, 5.0, 7, 7, True))  # sent much, and brought nothing
    assert loads(8, 0.0).backs_off
    budget.begin(5)
    assert budget.backs_off
    assert not budget.reads_prompts(0.0)
    budget.begin(4)
    assert not budget.backs_off
    assert budget.reads_prompts(0.0)
    budget.begin(5, temperature=1.2)  # nor do greedy rows speak for sampled ones
    assert not budget.backs_off


def test_no_node_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nodes=0"):
        SharedBudget(accounts(1, 0), nodes=0)
