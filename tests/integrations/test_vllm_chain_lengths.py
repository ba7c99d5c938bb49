"""How long chains are, by clocks whose best choice is known."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.integrations.vllm.chain_lengths import ChainLengths, VerifiedStep

LIKELY = 0.8 ** np.arange(1, 17)
"""How likely the tokens of each draft are, and as often they are accepted."""


def settled(rows: int, per_token: float, steps: int = 400) -> list[int]:
    """What is sent of each draft of the last steps, where a step takes 1 and so much more for each drafted token. Some
    drafts are shorter than others."""
    random, lengths, sent = np.random.default_rng(0), ChainLengths(), []
    for _ in range(steps):
        lengths.begin(rows)
        likely = int(np.count_nonzero(lengths.least <= LIKELY))
        count = 0 if lengths.rests else min(likely, int(random.integers(1, 2 * len(LIKELY))))
        expected = rows * float(LIKELY[:count].sum())
        seconds = 1 + per_token * rows * count
        lengths.book(VerifiedStep(rows, rows * count, expected, rows + round(expected), seconds))
        sent.append(0 if lengths.rests else likely)
    return sent[steps // 2 :]


def rates(rows: int, per_token: float) -> np.ndarray:
    """Tokens in a time, by the length of drafts."""
    counts = np.arange(len(LIKELY) + 1)
    tokens = rows * (1 + np.concatenate([[0], np.cumsum(LIKELY)]))
    return np.asarray(tokens / (1 + per_token * rows * counts))


@pytest.mark.parametrize("rows", [1, 12])
def test_all_is_sent_where_it_costs_nothing(rows: int) -> None:
    assert np.median(settled(rows, 0.0)) == len(LIKELY)


@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.03), (1, 0.1), (12, 0.003), (12, 0.01)])
def test_what_is_sent_brings_nearly_the_most(rows: int, per_token: float) -> None:
    found = rates(rows, per_token)
    sent = int(np.median(settled(rows, per_token)))
    assert sent >= found.argmax()
    assert found[sent] >= 0.8 * found.max()


@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.3), (12, 0.02), (12, 0.03), (12, 0.04)])
def test_where_a_token_costs_much_drafts_are_not_slower_than_none(rows: int, per_token: float) -> None:
    found = rates(rows, per_token)
    assert found[int(np.median(settled(rows, per_token)))] >= found[0]


def test_less_is_sent_of_each_of_many() -> None:
    assert np.median(settled(12, 0.03)) < np.median(settled(1, 0.03))


def test_drafts_rest_where_next_to_none_are_accepted() -> None:
    lengths, rests = ChainLengths(), []
    for _ in range(1500):
        lengths.begin(2)
        rests.append(lengths.rests)
        lengths.book(VerifiedStep(2, 0 if lengths.rests else 8, 4.0, 2, 1.0))
    assert 0.8 < np.mean(rests) < 1


def test_drafts_of_equal_lengths_go_on() -> None:
    """Where nothing tells what a token costs, likely ones are sent."""
    random, lengths = np.random.default_rng(2), ChainLengths()
    for step in range(1000):
        lengths.begin(16)
        sent = 10 if step < 20 else 64
        lengths.book(VerifiedStep(16, sent, 0.97 * sent, 16 + sent, (14 + 0.2 * sent) * random.lognormal(0, 0.3)))
        assert not lengths.rests
        assert lengths.least < 0.45


def test_a_long_step_changes_little() -> None:
    lengths = ChainLengths()
    for step in range(100):
        lengths.begin(4)
        lengths.book(VerifiedStep(4, 8 + step % 5, 6.0, 10, 1.0 + 0.01 * (step % 5)))
    lengths.begin(4)
    before = lengths.least
    lengths.book(VerifiedStep(4, 10, 6.0, 10, 50.0))
    for _ in range(8):
        lengths.begin(4)
        lengths.book(VerifiedStep(4, 10, 6.0, 10, 1.02))
    lengths.begin(4)
    assert lengths.least == pytest.approx(before, rel=0.3)


def test_drafts_that_pay_never_rest() -> None:
    random, lengths = np.random.default_rng(1), ChainLengths()
    for _ in range(2000):
        lengths.begin(16)
        sent = int(random.integers(20, 60))
        seconds = (10 + 0.2 * sent) * float(random.lognormal(0, 0.3))
        lengths.book(VerifiedStep(16, sent, 0.5 * sent, 16 + sent // 2, seconds))
        assert not lengths.rests
