"""Which nodes of which rows a step sends."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import DraftAccount
from lookahead.core.shared_budget import LEAST_LIKELY, SURELY_LIKELY, SharedBudget
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError


def accounts(fixed: float, per_node: float) -> Callable[[int, float], DraftAccount]:
    """Gives accounts of loads at which a step takes `fixed` seconds and `per_node` for each node."""
    points = [(nodes, 1, fixed + per_node * nodes) for nodes in (1, 2, 4, 8, 16, 32, 64, 128)]
    return cache(lambda load, temperature: DraftAccount(CostModel.fit(points), load, adaptive=False))


def chosen(budget: SharedBudget, offers: list[list[float]], prompt: int = 0) -> list[int]:
    """How many candidates of each row are sent, the first of which has so many tokens of a prompt before its root."""
    budget.begin(len(offers), timed=not prompt)
    sent = [0] * len(offers)
    if budget.backs_off:
        return sent
    for index, probabilities in enumerate(offers):
        row = budget.row()
        row.begin()
        row.offer(np.array(probabilities), 10)
        row.when_chosen(lambda count, index=index: sent.__setitem__(index, count))
    budget.share_out([TokenTree([1] * (prompt * (place == 0) + 1)) for place in range(len(offers))])
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
    budget.begin(4)
    assert not budget.backs_off
    budget.begin(5, temperature=1.2)  # nor do greedy rows speak for sampled ones
    assert not budget.backs_off


COMING_AND_GOING = (1, 3, 7, *[12] * 6, 9, 6, 4, 2, 1, 16, 40, *[64] * 4, 50, 30, 20, 10, 5, 3)
"""Rows, each for some steps."""


def rates(
    cost: tuple[float, float, float, float], budget: SharedBudget | None, each: int = 0
) -> dict[int, list[float]]:
    """Tokens per second at each load, in each of three visits, by a clock that is only a sum; of all loads at 0.

    A row's candidates follow each other, each right with the same probability, which differs by row and step.

    Args:
        cost: Milliseconds of a step, of each of its rows, of each of its nodes, and of looking for drafts of a row.
        budget: Chooses what is sent.
        each: What each row sends without it.
    """
    random, found = np.random.default_rng(0), dict[int, list[float]]()
    for _ in range(3):
        sums = {rows: np.zeros(2) for rows in COMING_AND_GOING}
        for rows in np.repeat(COMING_AND_GOING, 3).tolist():
            sure = random.choice([0.3, 0.6, 0.9], rows)
            runs = random.geometric(1 - sure) - 1
            offers = [[p**place for place in range(1, 21)] for p in sure.tolist()]
            sent = [each] * rows if budget is None else chosen(budget, offers)
            tokens = rows + int(np.minimum(runs, sent).sum())
            drafted = bool(each) if budget is None else not budget.backs_off
            looking = rows * drafted * cost[3] / 1000
            seconds = float(np.dot(cost[:3], [1, rows, rows + sum(sent)])) / 1000 + looking
            if budget is not None:
                nodes = rows + sum(sent)
                budget.book(StepTime(nodes, 10, seconds, tokens, rows, drafted, looking=looking))
            # the expected number, but for the luck of the draws
            sums[rows] += rows + sum(sum(own[:count]) for own, count in zip(offers, sent, strict=True)), seconds
        for rows, (tokens, seconds) in sums.items():
            found.setdefault(rows, []).append(float(tokens / seconds))
        found.setdefault(0, []).append(float(np.divide(*sum(sums.values()))))
    return found


@pytest.mark.parametrize(
    "cost",
    [(7, 0.4, 0.35, 0), (7, 0.4, 0.35, 0.4), (7, 0.4, 0.7, 0.2), (7, 0.4, 1.5, 0), (7, 1, 0.3, 0), (1, 0.2, 1, 0)],
)
def test_where_loads_come_and_go_no_fixed_number_of_drafts_is_better(cost: tuple[float, float, float, float]) -> None:
    budget = SharedBudget(cache(lambda load, temperature: DraftAccount(CostModel.prior(), load)))
    own, fixed = rates(cost, budget), [rates(cost, None, each) for each in (0, 2, 4, 8)]
    best = {load: [max(visit) for visit in zip(*(other[load] for other in fixed), strict=True)] for load in own}
    assert own[0][0] > 0.95 * best[0][0]  # in the first visit, when each load is new
    assert own[0][1] > 0.99 * best[0][1]
    assert all(own[load][2] > 0.93 * best[load][2] for load in own)


def test_drafts_beside_prompts_bring_what_their_time_brings_in_other_steps() -> None:
    def seconds(nodes: int) -> float:
        return 1 + 0.1 * nodes

    offers = [[0.9, 0.8, 0.65, 0.6, 0.3, 0.05], [0.9, 0.4, 0.2]]
    likely = sorted([*offers[0], *offers[1]], reverse=True)
    budget = SharedBudget(accounts(1, 0.1))
    beside = sum(chosen(budget, offers, prompt=500))
    other = max((2 + sum(likely[:count])) / seconds(2 + count) for count in range(len(likely) + 1))
    # The time of a step with a prompt, and of the further steps that bring the rest of so many tokens.
    times = [seconds(502 + count) + (100 - sum(likely[:count])) / other for count in range(len(likely) + 1)]
    assert beside == int(np.argmin(times)) > 0


def test_a_node_beside_prompts_costs_what_it_adds_and_not_what_rows_and_looking_take() -> None:
    random, account = np.random.default_rng(0), DraftAccount(CostModel.prior(), 8)
    for _ in range(6):  # 5 ms, and 2 for each row
        account.book(StepTime(8, 100, 0.021, 8, 8, False))
    for _ in range(30):
        nodes, looking = int(random.integers(400, 800)), random.uniform(0.005, 0.02)
        seconds = 0.021 + 0.0002 * (nodes - 8) + looking
        account.book(StepTime(nodes, 100, seconds, 20, 8, True, prompts=True, looking=looking))
    assert account.prompt_node_seconds == pytest.approx(0.0002, rel=0.02)


def test_a_prompt_is_read_for_drafting_where_no_other_row_teaches_the_memory() -> None:
    budget = SharedBudget(accounts(1, 0.01))
    row = budget.row()
    for rows, reads in ((1, True), (2, False), (40, False), (1, True)):
        budget.begin(rows, timed=False)
        assert row.reads_prompts == reads


def test_beside_prompts_sampled_rows_draft_once_drafts_have_paid() -> None:
    account = DraftAccount(CostModel.prior(), 4, cautious=True)
    budget = SharedBudget(lambda load, temperature: account)
    budget.begin(4, 1.0, timed=False)
    assert budget.backs_off
    for _ in range(10):
        budget.begin(4, 1.0)
        seconds = 1.0 if budget.backs_off else 1.1
        budget.book(
            StepTime(4 if budget.backs_off else 12, 10, seconds, 4 if budget.backs_off else 9, 4, not budget.backs_off)
        )
    budget.begin(4, 1.0, timed=False)
    assert not budget.backs_off


def test_what_is_looked_for_follows_what_was_sent() -> None:
    budget = SharedBudget(accounts(1, 0.1))
    assert budget.least == LEAST_LIKELY
    chosen(budget, [[0.9, 0.8, 0.16, 0.03], [0.9, 0.05]])  # those of 0.16 and less do not pay
    assert budget.least == pytest.approx(0.08)
    chosen(budget, [[0.99, 0.98, 0.5], [0.9, 0.4]])  # nor does one of 0.4, but it is no reason to find fewer
    assert budget.least <= SURELY_LIKELY
    for _ in range(10):  # all that is found is sent, or nothing is found
        chosen(budget, [[], []])
    assert budget.least == LEAST_LIKELY


def test_no_node_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nodes=0"):
        SharedBudget(accounts(1, 0), nodes=0)


def test_the_first_trees_explore() -> None:
    budget = SharedBudget(accounts(1, 1), explored=3)
    unlikely = [0.001] * 9
    budget.begin(2, temperature=1.0)
    assert not budget.explores
    assert chosen(budget, [unlikely, [0.001]]) == [4, 1]
    assert chosen(budget, [unlikely, unlikely]) == [4, 4]  # a step is not divided
    assert chosen(budget, [unlikely, unlikely]) == [0, 0]


def test_what_one_engine_has_learned_of_drafts_serves_the_next() -> None:
    known = accounts(1, 0.01)
    first, second = SharedBudget(known), SharedBudget(known)
    assert first.row(0.8).calibration is second.row(0.8).calibration


@pytest.mark.parametrize("waits", [False, True])
def test_the_row_with_the_most_to_write_comes_first_where_nothing_waits(waits: bool) -> None:
    budget = SharedBudget(accounts(1, 0), nodes=4)
    budget.begin(2, waits=waits)
    sent = {}
    for left in (10, 30):
        row = budget.row(longest=10 + left)
        row.begin()
        row.offer(np.array([0.5, 0.4]), 10)
        row.when_chosen(lambda count, left=left: sent.__setitem__(left, count))
    budget.share_out([TokenTree([1]), TokenTree([1])])
    assert sent == ({10: 1, 30: 1} if waits else {10: 0, 30: 2})
