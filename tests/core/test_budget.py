"""How many nodes a step sends, against trying all of them."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lookahead.core.budget import LEANING, WORTHWHILE, FixedBudget, ThroughputBudget
from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import DraftAccount
from lookahead.core.step_time import StepTime
from lookahead.errors import InvalidArgumentError

MOST = 24


class Costs:
    """Any seconds at all for 1, 2, ... nodes."""

    in_seconds = True

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = np.array([np.inf, *seconds])

    def step_time(self, nodes: np.ndarray, context: int) -> np.ndarray:
        return self.seconds[nodes]

    def table(self, most: int) -> np.ndarray:
        return np.stack([self.seconds, np.zeros_like(self.seconds)])


probabilities = st.lists(st.floats(0, 1), max_size=MOST + 5).map(lambda values: np.array(sorted(values, reverse=True)))


@settings(max_examples=200, deadline=None)
@given(probabilities, st.lists(st.floats(0.1, 10), min_size=MOST, max_size=MOST))
def test_the_number_of_nodes_is_the_one_with_most_tokens_per_second(
    probabilities: np.ndarray, seconds: list[float]
) -> None:
    account = DraftAccount(Costs(seconds))
    budget = ThroughputBudget(account, most=MOST)
    more = budget.offer(probabilities, context=7)
    rates = [
        (1 + probabilities[:count].sum()) / seconds[count] for count in range(min(len(probabilities), MOST - 1) + 1)
    ]
    rates[0] *= WORTHWHILE / account.idle_cost
    assume(max(rates) >= account.usual_rate / seconds[0])  # of steps that promise less, see the next test
    assert rates[budget.chosen] == pytest.approx(max(rates))
    assert budget.chosen + budget.left == MOST - 1
    if not more and 0 < len(probabilities) < MOST - 1:
        # Nothing that could follow, however likely it is within what it may be, beats the choice.
        for count in range(len(probabilities) + 1, MOST):
            best = (1 + probabilities.sum() + probabilities[-1] * (count - len(probabilities))) / seconds[count]
            assert best <= max(rates) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(probabilities, st.lists(st.floats(0.1, 10), min_size=MOST, max_size=MOST), st.floats(1, 9))
def test_a_step_that_promises_less_than_usual_gains_the_most_over_a_rate_between_its_own_and_the_usual_one(
    probabilities: np.ndarray, seconds: list[float], usual: float
) -> None:
    account = DraftAccount(Costs(seconds), adaptive=False)
    for _ in range(1000):
        account.book(StepTime(1, 7, 0.0, round(usual), rows=1, drafted=True))
    assert account.usual_rate == pytest.approx(round(usual) / account.idle_cost, rel=0.01)
    budget = ThroughputBudget(account, most=MOST)
    more = budget.offer(probabilities, context=7)
    tokens = [1 + probabilities[:count].sum() for count in range(min(len(probabilities), MOST - 1) + 1)]
    tokens[0] *= WORTHWHILE
    times = [seconds[0] * account.idle_cost, *seconds[1:]]
    own = max(token / time for token, time in zip(tokens, times, strict=False))
    rate = max(own, (1 - LEANING) * own + LEANING * account.usual_rate / seconds[0])
    gains = [token - rate * time for token, time in zip(tokens, times, strict=False)]
    assert gains[budget.chosen] == pytest.approx(max(gains))
    if not more and 0 < len(probabilities) < MOST - 1:
        further = probabilities.sum() + probabilities[-1] * np.arange(1, MOST - len(probabilities))
        assert (1 + further - rate * np.array(seconds[len(tokens) :])).max() <= max(gains) + 1e-9


def test_text_that_is_foreseen_now_and_then_is_decoded_sooner_than_by_the_best_ratio_of_each_step() -> None:
    costs = Costs([1 + 0.05 * nodes for nodes in range(MOST)])
    random = np.random.default_rng(0)

    def tokens_per_second(usual: bool) -> float:
        account, tokens, seconds = DraftAccount(costs, adaptive=False), 0, 0.0
        for turn in range(3000):
            budget = ThroughputBudget(account if usual else DraftAccount(costs, adaptive=False), most=MOST)
            likely = np.full(MOST - 1, 0.95) if turn % 3 else np.linspace(0.15, 0.01, MOST - 1)
            budget.offer(likely, context=7)
            accepted = int((random.random(budget.chosen) < likely[: budget.chosen]).sum())
            account.book(StepTime(1 + budget.chosen, 7, 0.0, 1 + accepted, rows=1, drafted=True))
            tokens, seconds = tokens + 1 + accepted, seconds + costs.seconds[1 + budget.chosen]
        return tokens / seconds

    assert tokens_per_second(usual=True) > 1.02 * tokens_per_second(usual=False)


def test_rows_of_a_batch_pay_for_their_nodes_together() -> None:
    costs = Costs([1.0] * 8 + [50.0] * 100)
    alone, together = (ThroughputBudget(DraftAccount(costs, rows), most=8) for rows in (1, 4))
    for budget in (alone, together):
        budget.offer(np.full(7, 0.9), context=0)
    assert alone.chosen == 7
    assert together.chosen == 1  # two nodes for each of four rows are eight


def test_what_turned_out_otherwise_is_believed_no_longer() -> None:
    budget = ThroughputBudget(DraftAccount(CostModel.prior(), adaptive=False))
    offered = np.full(20, 0.05)
    budget.offer(offered, context=0)
    assert budget.chosen == 20
    for _ in range(300):
        budget.offer(offered, context=0)
        budget.learn([])
    assert budget.chosen <= 1


def test_the_first_drafts_are_small_until_the_clock_has_told_what_they_cost() -> None:
    account = DraftAccount(CostModel.prior())
    budget = ThroughputBudget(account)
    sent = []
    for _ in range(5):
        assert not budget.offer(np.ones(127), context=0) or budget.chosen < 127
        sent.append(1 + budget.chosen)
        account.book(StepTime(sent[-1], 100, 1.0, 5, 1, drafted=True))
    assert sent == [8, 16, 32, 64, 128]


def test_it_backs_off_when_the_account_says_so_and_for_a_whole_step() -> None:
    account = DraftAccount(CostModel.prior())
    budget = ThroughputBudget(account)
    budget.begin()
    assert not budget.backs_off
    account.book(StepTime(9, 100, 99.0, 1, 1, drafted=True))
    assert account.backs_off
    assert not budget.backs_off  # the step that began goes on as it is
    budget.begin()
    assert budget.backs_off


def test_a_fixed_budget_takes_what_fits() -> None:
    budget = FixedBudget(4)
    assert budget.offer(np.array([0.1, 0.0]), context=0)
    assert (budget.chosen, budget.left) == (2, 1)
    assert not budget.offer(np.zeros(9), context=0)
    assert (budget.chosen, budget.left) == (3, 0)
    assert not budget.backs_off
    with pytest.raises(InvalidArgumentError, match="nodes=0"):
        FixedBudget(0)
