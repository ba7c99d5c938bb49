"""State made inside `torch.inference_mode` works in calls outside of it, and vice versa."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.tree_cache import TreeCache
from model_zoo import build
from quick import quickly

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
MORE = torch.tensor([[5, 7]])
GREEDY = {"max_new_tokens": 12, "do_sample": False}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"preset": "paper"},
    {"engine": "static"},
    {"memory": "process"},  # with the n-gram memory
]


def mode(inside: bool) -> AbstractContextManager[object]:
    return torch.inference_mode() if inside else nullcontext()


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return copy.deepcopy(build(request.param))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("given", quickly([False, True], [True]))
@pytest.mark.parametrize("inside", [True, False])
def test_a_cache_goes_in_and_out(model: PreTrainedModel, config: dict[str, Any], given: bool, inside: bool) -> None:
    options = GREEDY | {"lookahead_config": LookaheadConfig(**config)}
    with mode(inside):
        cache = {"past_key_values": DynamicCache(config=model.config)} if given else {}
        first = lookahead.generate(model, PROMPT, return_dict_in_generate=True, **cache, **options)
    with mode(not inside):
        text = torch.cat([first.sequences, MORE], dim=1)
        second = lookahead.generate(model, text, past_key_values=first.past_key_values, **options)
        assert torch.equal(second, model.generate(text, **GREEDY))
    with mode(inside):
        text = torch.cat([second, MORE], dim=1)
        third = model.generate(text, past_key_values=first.past_key_values, **GREEDY)
        assert torch.equal(third, model.generate(text, **GREEDY))


@pytest.mark.parametrize("inside", [True, False])
def test_transformers_goes_on_with_a_cache_of_ours(model: PreTrainedModel, inside: bool) -> None:
    with mode(inside):
        first = lookahead.generate(model, PROMPT, return_dict_in_generate=True, **GREEDY)
    with mode(not inside):
        text = torch.cat([first.sequences, MORE], dim=1)
        second = model.generate(text, past_key_values=first.past_key_values, **GREEDY)
        assert torch.equal(second, model.generate(text, **GREEDY))


def test_a_cache_filled_inside_can_be_changed_outside() -> None:
    cache = TreeCache()
    states = torch.arange(12.0).view(1, 1, 4, 3)
    with torch.inference_mode():
        cache.update(states, states, 0)
        cache.set_length(cache.length + 4)
    keys, _ = cache.update(states, states, 0)
    assert torch.equal(keys, torch.cat([states, states], dim=2))
