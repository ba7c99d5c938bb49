"""How long chains are, by clocks whose best choice is known."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.core.draft_account import StepTime
from lookahead.integrations.vllm.chain_lengths import ChainLengths

LIKELY = 0.8 ** np.arange(1, 17)
"""How likely the tokens of each draft are, and as often they are accepted."""


def settled(rows: int, per_token: float, steps: int = 200) -> list[int]:
    """What is sent of each draft of the last steps, where a step takes 1 and so much more for each drafted token."""
    lengths, sent = ChainLengths(), []
    for _ in range(steps):
        lengths.begin(rows)
        count = 0 if lengths.rests else lengths.choose(LIKELY)
        expected = rows * float(LIKELY[:count].sum())
        seconds = 1 + per_token * rows * count
        tokens = rows + round(expected)
        lengths.book(StepTime(rows * (1 + count), 50, seconds, tokens, rows, not lengths.rests), expected)
        sent.append(count)
    return sent[steps // 2 :]


def best(rows: int, per_token: float) -> int:
    """The length that makes for the most tokens in a time."""
    counts = np.arange(len(LIKELY) + 1)
    tokens = rows * (1 + np.concatenate([[0], np.cumsum(LIKELY)]))
    return int(np.argmax(tokens / (1 + per_token * rows * counts)))


@pytest.mark.parametrize("rows", [1, 12])
def test_all_is_sent_where_it_costs_nothing(rows: int) -> None:
    assert np.median(settled(rows, 0.0)) >= len(LIKELY) - 2  # sizes that were never run are guessed to cost something


@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.1), (1, 0.3), (12, 0.01), (12, 0.03)])
def test_about_as_much_is_sent_as_pays(rows: int, per_token: float) -> None:
    assert abs(np.median(settled(rows, per_token)) - best(rows, per_token)) <= 2


def test_it_rests_where_each_token_costs_a_step() -> None:
    assert np.mean(settled(1, 1.5)) < 1
