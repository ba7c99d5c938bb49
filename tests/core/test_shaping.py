"""What sampling makes of listed probabilities, against transformers' own warpers."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.core.shaping import Shaping

VOCABULARY = 40
WARPERS = {
    "temperature 0.5": [TemperatureLogitsWarper(0.5)],
    "temperature 1.5": [TemperatureLogitsWarper(1.5)],
    "top-k 3": [TopKLogitsWarper(3)],
    "top-p 0.7": [TopPLogitsWarper(0.7)],
    "min-p 0.2": [MinPLogitsWarper(0.2)],
    "all": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
}


def listed(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    top = logits.softmax(dim=-1).topk(count, dim=-1)
    return top.indices.numpy(), top.values.numpy()


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("count", [VOCABULARY, 8])
def test_listed_probabilities_are_shaped_as_transformers_shapes_logits(name: str, count: int) -> None:
    logits = 3 * torch.randn(30, VOCABULARY, generator=torch.Generator().manual_seed(0))
    sampler = TextSampler(LogitsProcessorList(WARPERS[name]), SamplingNoise().row())
    ids, probabilities = sampler.shaping.apply(*listed(logits, count))
    expected = LogitsProcessorList(WARPERS[name])(torch.zeros(30, 1, dtype=torch.long), logits.clone()).softmax(dim=-1)
    # of what is not listed only the sum is known
    tolerance = 1e-4 if count == VOCABULARY else 0.08
    for node in range(30):
        kept = ids[node] >= 0
        own = np.zeros(VOCABULARY)
        own[ids[node][kept]] = probabilities[node][kept]
        among = listed(logits, count)[0][node]
        assert np.abs(own - expected[node].numpy())[among].max() < tolerance
        if count == VOCABULARY:
            assert kept.sum() == int((expected[node] > 0).sum())


def test_nothing_changes_without_warpers() -> None:
    ids, probabilities = listed(torch.randn(2, VOCABULARY), 8)
    sampler = TextSampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]), SamplingNoise().row())
    assert not sampler.shaping.changes
    shaped = sampler.shaping.apply(ids, probabilities)
    assert shaped[0] is ids
    assert shaped[1] is probabilities


def test_nodes_that_were_not_read_stay_unread() -> None:
    ids, probabilities = np.full((1, 4), -1), np.zeros((1, 4), dtype=np.float32)
    shaped = Shaping(0.7, 3, 0.9, 0.1).apply(ids, probabilities)
    assert shaped[0].tolist() == ids.tolist()
    assert not shaped[1].any()


@pytest.mark.parametrize("temperature", [1e-2, 5e-3, 1e-3, 1e-6])
def test_low_temperatures_leave_the_likeliest_token(temperature: float) -> None:
    logits = torch.randn(30, VOCABULARY, generator=torch.Generator().manual_seed(0))  # the likeliest have 1 in 10
    for count in (VOCABULARY, 8):
        ids, probabilities = Shaping(temperature).apply(*listed(logits, count))
        expected = (logits.double() / temperature).softmax(dim=-1).gather(1, listed_ids(logits, count))
        np.testing.assert_allclose(probabilities, expected, atol=1e-4)
        assert (ids[:, 0] == logits.argmax(dim=-1).numpy()).all()
        assert ((ids >= 0) == (probabilities > 0)).all()


def listed_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    return torch.from_numpy(listed(logits, count)[0])
