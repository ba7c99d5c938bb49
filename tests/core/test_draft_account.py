"""Whether drafting pays, against simulated clocks: what is lost to plain decoding, and to drafting always."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import (
    CAUTIOUS_CREDIT,
    FIRST_CREDIT,
    INCOME,
    MOST_CREDIT,
    RESUMED_CREDIT,
    DraftAccount,
    StepTime,
)

NODES = 8
LATE_DRAFTS = 40
"""Drafts that may be lost because it is noticed late that they lose: where the clock is noisy it takes some 30 steps to
know what they cost."""

Draft = tuple[int, float]
"""Tokens that a drafted step brings, and its seconds."""


def decode(
    account: DraftAccount, drafts: Iterator[Draft], plain: Callable[[], float], tokens: int
) -> tuple[float, int, int]:
    """Seconds, tokens and drafted steps of decoding at least so many tokens, by a clock that is only a number."""
    seconds, brought, drafted = 0.0, 0, 0
    while brought < tokens:
        rests = account.backs_off
        added, took = (1, plain()) if rests else next(drafts)
        account.book(StepTime(1 if rests else NODES, 100, took, added, 1, not rests))
        seconds += took
        brought += added
        drafted += not rests
    return seconds, brought, drafted


def geometric(generator: random.Random, mean: float) -> int:
    """Tokens of a step whose drafts are accepted or not independently."""
    added = 1
    while generator.random() > 1 / mean:
        added += 1
    return added


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 60), st.integers(1, NODES)), min_size=1, max_size=12),
    cost=st.floats(1.0, 4.0),
    noise=st.floats(0.0, 0.2),
    seed=st.integers(0, 1000),
)
def test_whatever_drafts_bring_little_is_lost_to_plain_decoding(
    blocks: list[tuple[int, int]], cost: float, noise: float, seed: int
) -> None:
    generator = random.Random(seed)

    def jitter() -> float:
        return 1 + noise * (2 * generator.random() - 1)

    def drafts() -> Iterator[Draft]:
        for steps, added in cycle(blocks):
            for _ in range(steps):
                yield added, cost * jitter()

    account = DraftAccount(CostModel.prior())
    seconds, tokens, _ = decode(account, drafts(), jitter, 4000)
    assert seconds <= tokens * (1 + INCOME) + MOST_CREDIT + LATE_DRAFTS * cost


@pytest.mark.parametrize("cost", [1.05, 1.5, 4.0])
def test_drafts_that_never_bring_anything_cost_one_percent(cost: float) -> None:
    account = DraftAccount(CostModel.prior())
    seconds, tokens, drafted = decode(account, cycle([(1, cost)]), lambda: 1.0, 5000)
    assert seconds <= tokens * (1 + INCOME) + FIRST_CREDIT + 2 * cost
    assert drafted > 10  # and they are tried again and again


@pytest.mark.parametrize("saved", [-0.4, -0.1, 0.05, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("texts", [10, pytest.param(40, marks=pytest.mark.exact)])
def test_with_independent_outcomes_little_is_lost_to_the_better_of_both(saved: float, texts: int) -> None:
    cost, mean = 1.5, 1.5 + saved  # of a drafted step: plain steps of time, tokens in the mean
    losses = []
    for seed in range(texts):
        generator = random.Random(seed)
        drafts = ((geometric(generator, mean), cost) for _ in cycle([None]))
        seconds, _, drafted = decode(DraftAccount(CostModel.prior()), drafts, lambda: 1.0, 6000)
        expected = (seconds - drafted * cost) + drafted * mean  # tokens, but for the luck of the draws
        losses.append(seconds / (expected * min(1.0, cost / mean)) - 1)
    assert sum(losses) / len(losses) <= 0.01


@pytest.mark.parametrize("cost", [1.05, 1.5, 4.0])
def test_cautious_drafting_that_never_brings_anything_costs_a_short_call_little(cost: float) -> None:
    account = DraftAccount(CostModel.prior(), cautious=True)
    assert account.backs_off  # plain steps are timed first
    assert not account.reads_prompts
    seconds, tokens, drafted = decode(account, cycle([(1, cost)]), lambda: 1.0, 300)
    assert seconds <= tokens * (1 + INCOME) + CAUTIOUS_CREDIT + cost
    assert drafted > 0


def test_cautious_drafting_that_pays_goes_on_and_reads_prompts() -> None:
    account = DraftAccount(CostModel.prior(), cautious=True)
    seconds, tokens, _ = decode(account, cycle([(2, 1.2)]), lambda: 1.0, 1000)
    assert seconds < 0.65 * tokens
    assert account.reads_prompts


def test_a_draft_that_nobody_knew_the_price_of_is_booked_at_its_own() -> None:
    account = DraftAccount(CostModel.prior(), cautious=True)
    while account.backs_off:
        account.book(StepTime(1, 100, 1.0, 1, 1, drafted=False))
    account.book(StepTime(NODES, 100, CAUTIOUS_CREDIT + 1.5, 1, 1, drafted=True))
    assert account.backs_off


def test_drafting_is_taken_up_again_when_it_begins_to_pay() -> None:
    account = DraftAccount(CostModel.prior())
    decode(account, cycle([(1, 1.5)]), lambda: 1.0, 3000)
    seconds, tokens, _ = decode(account, cycle([(3, 1.5)]), lambda: 1.0, 3000)
    assert seconds < 0.6 * tokens + RESUMED_CREDIT / INCOME


def test_without_a_clock_the_same_tokens_are_the_same_steps() -> None:
    def steps(seconds: float) -> list[bool]:
        account, rests = DraftAccount(CostModel.prior(), adaptive=False), []
        for _ in range(2000):
            rests.append(account.backs_off)
            account.book(StepTime(1 if rests[-1] else 64, 100, seconds, 1, 1, not rests[-1]))
        return rests

    assert steps(1.0) == steps(99.0)
    assert any(steps(1.0))
    assert not all(steps(1.0))


def test_a_disturbed_step_ends_nothing() -> None:
    account = DraftAccount(CostModel.prior())
    decode(account, cycle([(3, 1.5)]), lambda: 1.0, 1000)
    account.book(StepTime(NODES, 100, 5000.0, 1, 1, drafted=True))
    assert not account.backs_off


def test_looking_for_drafts_in_vain_is_paid_for_as_well() -> None:
    account = DraftAccount(CostModel.prior())
    seconds = tokens = 0.0
    for _ in range(5000):
        took = 1.0 if account.backs_off else 1.2
        account.book(StepTime(1, 100, took, 1, 1, not account.backs_off))
        seconds, tokens = seconds + took, tokens + 1
    assert seconds <= tokens * (1 + INCOME) + FIRST_CREDIT + 2
    assert account.idle_cost == pytest.approx(1.2, abs=0.02)


@pytest.mark.parametrize("adaptive", [True, False])
def test_certain_tokens_say_nothing_of_whether_drafting_pays(adaptive: bool) -> None:
    account = DraftAccount(CostModel([1, 5, 13], [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]), adaptive=adaptive)
    for _ in range(40):  # four certain tokens each, for one second; eight nodes beside them bring nothing for two
        account.book(StepTime(13, 100, 4.0, 5, 1, True, certain_nodes=4, certain_tokens=4))
    assert account.rests


def test_the_first_look_for_drafts_which_takes_long_is_soon_forgotten() -> None:
    account = DraftAccount(CostModel.prior())
    for looking in (10.0, *[0.1] * 4):
        account.book(StepTime(NODES, 100, 1.0 + looking, 1, 1, True, looking=looking))
    assert account.looking < 0.3


def test_the_first_draft_is_held_against_what_a_plain_step_takes_in_seconds() -> None:
    account = DraftAccount(CostModel.prior())
    account.book(StepTime(NODES, 100, 0.005, 1, 1, True))  # which brings no more than a plain step, and is no faster
    assert account.usual_rate <= 1
