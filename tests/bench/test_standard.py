"""Whether `auto` is compared with the best of the others, chosen on cases that it is not compared on."""

import pytest

from standard import held_out


def test_compares_with_the_way_that_is_best_on_the_other_half() -> None:
    seconds = {
        "plain": [4.0, 4.0, 4.0, 4.0],
        "auto": [2.0, 2.0, 2.0, 2.0],
        "lucky": [1.0, 8.0, 1.0, 8.0],  # best on one half alone
        "steady": [1.6, 1.6, 1.6, 1.6],
    }
    found = held_out(seconds)
    assert found["best"] == "lucky / steady"
    assert found["auto_speed"] == 2.0
    assert found["over_best"] == pytest.approx((8.0 / 2 + 1.6 / 2) / 2)  # the median of four lies between both
    assert found["low"] <= found["over_best"] <= found["high"]
