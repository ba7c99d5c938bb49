"""The shares of repeated text, against a direct implementation of the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.bench.summary import repeated_cycle_share, tokens_before_cycles

# Few distinct tokens, so that runs of all periods are common; and texts of one repeated block.
NOISE = st.lists(st.integers(0, 2), max_size=40)
REPEATED = st.builds(
    lambda before, block, copies, after: before + block * copies + after,
    NOISE,
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 5),
    NOISE,
)
TEXTS = st.one_of(NOISE, REPEATED)


def cycles_by_definition(tokens: list[int], max_period: int) -> Iterator[tuple[int, int]]:
    """Yield the longest stretch for every start and period, if it is long enough."""
    for start in range(len(tokens)):
        for period in range(1, max_period + 1):
            end = start + period
            while end < len(tokens) and tokens[end] == tokens[end - period]:
                end += 1
            if end <= len(tokens) and end - start >= max(2 * period, period + 8):
                yield start, end


@settings(deadline=None)
@given(tokens=TEXTS, max_period=st.sampled_from([1, 3, 8, 256]))
def test_repeated_share_follows_the_definition(tokens: list[int], max_period: int) -> None:
    covered = {i for cycle in cycles_by_definition(tokens, max_period) for i in range(*cycle)}
    expected = len(covered) / len(tokens) if tokens else 0.0
    assert repeated_cycle_share(tokens, max_period=max_period) == pytest.approx(expected)


@settings(deadline=None)
@given(tokens=TEXTS, max_period=st.sampled_from([1, 3, 8, 256]))
def test_tokens_before_cycles_follow_the_definition(tokens: list[int], max_period: int) -> None:
    starts = [start for start, _ in cycles_by_definition(tokens, max_period)]
    assert tokens_before_cycles(tokens, max_period=max_period) == min(starts, default=len(tokens))


@settings(deadline=None)
@given(tokens=TEXTS)
def test_direction_and_names_of_tokens_do_not_matter(tokens: list[int]) -> None:
    share = repeated_cycle_share(tokens)
    assert repeated_cycle_share(tokens[::-1]) == pytest.approx(share)
    assert repeated_cycle_share([10**9 + 7 * token for token in tokens]) == pytest.approx(share)


@pytest.mark.parametrize(
    ("tokens", "repeated", "before"),
    [
        ([], 0.0, 0),
        ([5], 0.0, 1),
        (list(range(50)), 0.0, 50),
        ([1] * 8, 0.0, 8),  # only seven tokens repeat their predecessor
        ([1] * 9, 1.0, 0),
        ([1, 2] * 4, 0.0, 8),
        ([1, 2] * 5, 1.0, 0),
        ([*range(20), *range(20)], 1.0, 0),  # both copies count
        ([*range(20), *range(19)], 0.0, 39),  # one token short of two copies
        ([*range(20), *range(20), *range(7)], 1.0, 0),  # the last copy is cut short
        ([*range(100, 110), *[7] * 10], 0.5, 10),
        ([*[7] * 10, *range(100, 110)], 0.5, 0),
        ([*[7] * 10, *range(100, 120), *[8, 9] * 5], 0.5, 0),
    ],
)
def test_cycles_are_found_by_their_definition(tokens: list[int], repeated: float, before: int) -> None:
    assert repeated_cycle_share(tokens) == pytest.approx(repeated)
    assert tokens_before_cycles(tokens) == before


def test_long_periods_are_left_out_on_request() -> None:
    tokens = [*range(20), *range(20)]
    assert repeated_cycle_share(tokens, max_period=20) == 1.0
    assert repeated_cycle_share(tokens, max_period=19) == 0.0


def test_long_texts_are_no_burden() -> None:
    """An algorithm of quadratic time would take hours."""
    assert repeated_cycle_share([i * i % 65521 for i in range(100_000)]) == 0.0
