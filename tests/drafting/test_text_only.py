"""Drafts without predictions: counts of tokens in the memory, and drafts from them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from lookahead.core.protocols import FixedBudget
from lookahead.drafting import AutoDrafter, DraftMemory, PredictedText
from ngram_access import insert, lookup
from playback import play_text

LINE = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_running_means_at_each_length(seed: int) -> None:
    random, old = Random(seed), 0.6
    memory = DraftMemory(3, 4096, 4, old_share=old, observed=True)
    text = [random.randrange(4) for _ in range(60)]
    shares: dict[tuple[int, ...], dict[int, float]] = {}
    for place in range(1, len(text)):
        context = [text[place - 1 - back] if place - 1 - back >= 0 else -1 for back in range(3)]
        insert(memory, np.array([context]), np.array([[text[place]]]), np.ones((1, 1), dtype=np.float32))
        for size in range(1, min(3, place) + 1):
            own = shares.setdefault(tuple(context[:size]), {})
            for token in own:
                own[token] *= old
            own[text[place]] = own.get(text[place], 0.0) + 1 - old
    for key, expected in shares.items():
        known, ids, probabilities = lookup(memory, np.array([[*key, *[-1] * (3 - len(key))]]))
        level = len(key) - 1
        assert known[0, level]
        listed = zip(ids[0, level].tolist(), probabilities[0, level].tolist(), strict=True)
        assert {token: share for token, share in listed if token >= 0} == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("chains", [False, True])
def test_text_of_the_prompt_takes_few_steps(chains: bool) -> None:
    prompt = [1, 2, *LINE, 3]
    assert play_text(prompt, [1, 2, *LINE], AutoDrafter(DraftMemory.of_texts(), 16, chains=chains)).steps <= 3


def test_requests_draft_from_earlier_ones() -> None:
    memory, answer = DraftMemory.of_texts(), [30, *LINE, *LINE[::-1]]
    first = play_text([1], answer, AutoDrafter(memory, 16)).steps
    assert play_text([2], answer, AutoDrafter(memory, 16)).steps < first
    assert play_text([2], answer, AutoDrafter(DraftMemory.of_texts(), 16)).steps == first


def test_the_memory_is_bounded_and_drops_its_oldest_entries() -> None:
    memory, random = DraftMemory.of_texts(64), Random(0)
    texts = [[random.randrange(1000) for _ in range(50)] for _ in range(20)]
    for text in texts:
        play_text([1], text, AutoDrafter(memory, 16))
    statistics = memory.statistics()
    assert max(statistics["entries"]) <= statistics["capacity"] == 64
    newest, oldest = (play_text([2], text, AutoDrafter(memory, 16)).steps for text in (texts[-1], texts[0]))
    assert newest < oldest


def test_the_most_frequent_continuation_is_the_first() -> None:
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 9, 7, 1, 2]
    assert play_text(prompt, [3, 4], AutoDrafter(DraftMemory.of_texts(), 3, chains=True)).steps == 1


def test_a_predicted_text_is_drafted_from() -> None:
    random = Random(0)
    text = [random.randrange(100, 1000) for _ in range(40)]
    assert play_text([1], text, AutoDrafter(DraftMemory.of_texts(), 16, predicted=PredictedText(text))).steps <= 4


def test_tokens_that_are_unlikely_are_not_drafted() -> None:
    random = Random(1)
    prompt = [random.randrange(6) for _ in range(200)]
    budgets = FixedBudget(16), FixedBudget(16, min_probability=0.4)
    filled, likely = (play_text(prompt, LINE, AutoDrafter(DraftMemory.of_texts(), budget)) for budget in budgets)
    assert likely.mean_nodes < filled.mean_nodes
    sure = play_text(
        [1, 2, *LINE, 1], [2, *LINE], AutoDrafter(DraftMemory.of_texts(), FixedBudget(16, min_probability=0.1))
    )
    assert sure.steps < len(LINE)
