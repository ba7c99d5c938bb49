"""Comparison of `auto` with the best other method, chosen by speed on held-out cases."""

import pytest

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
