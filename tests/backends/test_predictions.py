"""The likeliest tokens of a row of logits, against torch's argmax and topk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.backends.forward_result import argmax, top_predictions


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 7, 512, 4095, 4096, 4097, 5000, 32000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    levels=st.integers(1, 1000),
    seed=st.integers(0, 10**6),
)
def test_argmax_is_torchs_own_with_ties_and_infinities(rows, vocabulary, dtype, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocabulary), generator=generator).to(dtype)  # few levels: many ties
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    assert argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("place", [0, 5000, 5119])
def test_argmax_of_nan_equals_torchs(place):
    logits = torch.randn(2, 5120 + 3)
    logits[:, place] = torch.nan
    assert argmax(logits).tolist() == logits.argmax(dim=-1).tolist()
    logits[:, -1] = torch.nan
    assert argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([8, 512, 4096, 4097, 32000]),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.01, 4.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_top_predictions_equal_a_softmax(rows, vocabulary, count, dtype, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    logits[:, vocabulary // 2 : vocabulary // 2 + vocabulary // 8] = -torch.inf
    ids, probabilities = top_predictions(logits, count)
    softmax = logits.float().softmax(dim=-1)
    expected = softmax.topk(count, dim=-1).values
    assert torch.allclose(probabilities, expected, rtol=1e-3)
    assert torch.allclose(softmax.gather(1, ids), expected), "tokens may differ among equally likely ones"
    assert all(len(set(row)) == count for row in ids.tolist())


def test_of_equal_logits_the_first_is_the_likeliest():
    logits = torch.zeros(2, 5000)
    logits[1, [4990, 700, 30]] = 1.0
    assert [row[:3] for row in top_predictions(logits, 8)[0].tolist()] == [[0, 1, 2], [30, 700, 4990]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("vocabulary", [8192, 8200])
def test_where_logits_are_no_numbers_tokens_are_listed_all_the_same(value: float, vocabulary: int) -> None:
    for places in (slice(77, 78), slice(-1, None), slice(None)):
        logits = torch.randn(1, vocabulary)
        logits[0, places] = value
        ids, probabilities = top_predictions(logits, 8)
        assert ((ids >= 0) & (ids < vocabulary)).all()
        assert ((probabilities >= 0) & (probabilities <= 1)).all()
