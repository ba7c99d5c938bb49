"""How long chains are, by clocks whose best choice is known."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.integrations.vllm.chain_lengths import ChainLengths, VerifiedStep

LIKELY = 0.8 ** np.arange(1, 17)
"""How likely the tokens of each draft are, and as often they are accepted."""


POSSIBLE = np.arange(1, 2 * len(LIKELY))
"""How many tokens a draft can have, each as often."""


def settled(rows: int, per_token: float, steps: int = 400) -> tuple[list[int], float]:
    """How long drafts may be in the last steps, where a step takes 1 and so much more for each drafted token, and how
    many tokens these steps bring in a time."""
    random, lengths, most = np.random.default_rng(0), ChainLengths(), []
    tokens = seconds = 0.0
    for step in range(steps):
        lengths.begin(rows)
        likely = int(np.count_nonzero(lengths.least <= LIKELY))
        count = 0 if lengths.rests else min(likely, int(random.choice(POSSIBLE)))
        expected = rows * float(LIKELY[:count].sum())
        lost = rows * float(np.maximum(lengths.worth - LIKELY[:count], 0).sum())
        took = 1 + per_token * rows * count
        lengths.book(VerifiedStep(rows, rows * count, expected, lost, rows + round(expected), took))
        if step >= steps // 2:
            most.append(0 if lengths.rests else likely)
            tokens, seconds = tokens + rows + expected, seconds + took
    return most, tokens / seconds


def rates(rows: int, per_token: float) -> np.ndarray:
    """Tokens in a time, by the length that drafts may have."""
    accepted, found = np.concatenate([[0], np.cumsum(LIKELY)]), []
    for most in range(len(LIKELY) + 1):
        counts = np.minimum(most, POSSIBLE)
        found.append(rows * (1 + accepted[counts]).mean() / (1 + per_token * rows * counts).mean())
    return np.array(found)


@pytest.mark.parametrize("rows", [1, 12])
def test_all_is_sent_where_it_costs_nothing(rows: int) -> None:
    assert np.median(settled(rows, 0.0)[0]) == len(LIKELY)


@pytest.mark.parametrize(
    ("rows", "per_token"), [(1, 0.03), (1, 0.1), (1, 0.3), (12, 0.003), (12, 0.01), (12, 0.02), (12, 0.03), (12, 0.04)]
)
def test_what_is_sent_brings_nearly_the_most_in_a_time(rows: int, per_token: float) -> None:
    best = rates(rows, per_token)
    _, found = settled(rows, per_token)
    assert found >= 0.9 * best.max()
    assert found >= best[0]  # without drafts


@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.03), (1, 0.1), (12, 0.003), (12, 0.01)])
def test_steps_are_fewer_than_those_that_bring_the_most_in_a_time(rows: int, per_token: float) -> None:
    assert np.mean(settled(rows, per_token)[0]) > rates(rows, per_token).argmax()


def test_less_is_sent_of_each_of_many() -> None:
    assert np.median(settled(12, 0.03)[0]) < np.median(settled(1, 0.03)[0])


def test_drafts_rest_where_next_to_none_are_accepted() -> None:
    lengths, rests = ChainLengths(), []
    for _ in range(1500):
        lengths.begin(2)
        rests.append(lengths.rests)
        lengths.book(VerifiedStep(2, 0 if lengths.rests else 8, 4.0, 0.0, 2, 1.0))
    assert 0.8 < np.mean(rests) < 1


def test_drafts_of_equal_lengths_go_on() -> None:
    """Where nothing tells what a token costs, likely ones are sent."""
    random, lengths = np.random.default_rng(2), ChainLengths()
    for step in range(1000):
        lengths.begin(16)
        sent = 10 if step < 20 else 64
        lengths.book(VerifiedStep(16, sent, 0.97 * sent, 0.0, 16 + sent, (14 + 0.2 * sent) * random.lognormal(0, 0.3)))
        assert not lengths.rests
        assert lengths.least < 0.45


def test_a_long_step_changes_little() -> None:
    lengths = ChainLengths()
    for step in range(100):
        lengths.begin(4)
        lengths.book(VerifiedStep(4, 8 + step % 5, 6.0, 0.0, 10, 1.0 + 0.01 * (step % 5)))
    lengths.begin(4)
    before = lengths.least
    lengths.book(VerifiedStep(4, 10, 6.0, 0.3, 10, 50.0))
    for _ in range(8):
        lengths.begin(4)
        lengths.book(VerifiedStep(4, 10, 6.0, 0.3, 10, 1.02))
    lengths.begin(4)
    assert lengths.least == pytest.approx(before, rel=0.3)


def test_drafts_that_pay_never_rest() -> None:
    random, lengths = np.random.default_rng(1), ChainLengths()
    for _ in range(2000):
        lengths.begin(16)
        sent = int(random.integers(20, 60))
        seconds = (10 + 0.2 * sent) * float(random.lognormal(0, 0.3))
        lengths.book(VerifiedStep(16, sent, 0.5 * sent, 0.5, 16 + sent // 2, seconds))
        assert not lengths.rests
