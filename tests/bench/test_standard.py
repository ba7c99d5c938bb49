"""Comparison of `auto` with the best other method, chosen by speed on held-out cases."""

from pathlib import Path
from typing import Any

import pytest

from cases import Case
from lines import Models
from lookahead import LookaheadConfig
from prices import PRICES, PricedRunner
from standard import held_out


def test_compares_with_the_way_that_is_best_on_the_other_half() -> None:
    seconds = {
        "plain": [4.0, 4.0, 4.0, 4.0],
        "auto": [2.0, 2.0, 2.0, 2.0],
        "lucky": [1.0, 8.0, 1.0, 8.0],  # best on only one half
        "steady": [1.6, 1.6, 1.6, 1.6],
    }
    result = held_out(seconds)
    assert result["best"] == "lucky / steady"
    assert result["auto_speed"] == 2.0
    assert result["over_best"] == pytest.approx((8.0 / 2 + 1.6 / 2) / 2)  # the median of four values
    assert result["low"] <= result["over_best"] <= result["high"]


def test_step_times_follow_the_table_of_prices(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    case = Case("count", tokenizer("def count(words):\n    counts = {}\n").input_ids)
    runner = PricedRunner(Models(Path("nowhere")), "gpu")

    def texts(config: LookaheadConfig | None) -> Any:
        return runner.generate(model, case, config, max_new_tokens=40, min_new_tokens=40)

    plain, alone, fixed = texts(None), texts(LookaheadConfig(step_budget=1)), texts(LookaheadConfig(step_budget=16))
    assert plain.tokens == alone.tokens == fixed.tokens
    assert alone.seconds == plain.seconds == len(plain.tokens) - 1
    assert fixed.steps - 1 < fixed.seconds <= (fixed.steps - 1) * PRICES["gpu"][4]
    first, again = (texts(LookaheadConfig()) for _ in range(2))
    assert first.tokens == plain.tokens == again.tokens
    assert first.seconds < plain.seconds
