"""The likeliest tokens of a row of logits, against torch's own argmax and topk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.backends.predictions import argmax, top_predictions


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
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("place", [0, 5000, 5119])
def test_argmax_of_what_is_not_a_number_is_torchs_own(place):
    logits = torch.randn(2, 5120 + 3)
    logits[:, place] = torch.nan
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))
    logits[:, -1] = torch.nan
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([8, 512, 4096, 4097, 32000]),
    count=st.integers(1, 8),
    seed=st.integers(0, 10**6),
)
def test_top_predictions_are_torchs_own(rows, vocabulary, count, seed):
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    ids, probabilities = top_predictions(logits, count)
    expected = logits.softmax(dim=-1).topk(count, dim=-1)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(probabilities, expected.values)
