"""Memory of earlier calls: the default of all entry points, bounded, and apart by tenant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig
from model_zoo import build

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


def door(name: str, model: PreTrainedModel, config: LookaheadConfig) -> Callable[[], int]:
    """Return a function that decodes the prompt and returns the number of steps."""
    if name == "generate":
        return lambda: lookahead.generate(model, PROMPT, lookahead_config=config, **OPTIONS).statistics.steps
    if name == "attach":
        lookahead.attach(model, config)
        return lambda: int(model.generate(PROMPT, **OPTIONS).statistics.steps)
    engine = Engine(model, config, prefix_cache=False)
    return lambda: steps_of(engine)


def steps_of(engine: Engine, **options: Any) -> int:
    handle = engine.submit(PROMPT, **options, **OPTIONS)
    handle.result()
    return handle.statistics.steps


@pytest.mark.parametrize("name", ["generate", "attach", "engine"])
def test_later_calls_draft_from_earlier_ones_by_default(model: PreTrainedModel, name: str) -> None:
    decode = door(name, model, LookaheadConfig(step_budget=16))
    first = decode()
    assert decode() < first
    apart = door(name, model, LookaheadConfig(step_budget=16, memory="request"))
    assert apart() == apart() == first


def test_other_methods_remember_nothing_and_keep_no_file() -> None:
    assert LookaheadConfig().memory == "process"
    assert LookaheadConfig(preset="paper") == LookaheadConfig(preset="paper", memory="process")
    assert LookaheadConfig(preset="paper").memory == "request"


def test_tenants_share_neither_predictions_nor_beginnings(model: PreTrainedModel) -> None:
    engine = Engine(model, LookaheadConfig(step_budget=16))
    first = steps_of(engine, tenant="one")
    assert steps_of(engine, tenant="other") == first
    assert engine.statistics.hit_rate == 0
    assert steps_of(engine, tenant="one") < first
    assert engine.statistics.hit_rate > 0


def test_tenants_do_not_share_the_beginnings_of_running_texts(model: PreTrainedModel) -> None:
    engine = Engine(model, LookaheadConfig(step_budget=16))
    engine.submit(PROMPT, tenant="one", **OPTIONS)
    engine.step()
    other, same = (engine.submit(PROMPT, tenant=tenant, **OPTIONS) for tenant in ("other", "one"))
    engine.run()
    assert other.statistics.reused_tokens == 0
    assert same.statistics.reused_tokens > 0


def test_the_oldest_of_many_memories_is_dropped(model: PreTrainedModel) -> None:
    """A model has at most 16 memories."""
    engine = Engine(model, LookaheadConfig(step_budget=16), prefix_cache=False)
    first = steps_of(engine, tenant=0)
    assert steps_of(engine, tenant=0) < first
    for tenant in range(1, 17):
        engine.submit(PROMPT[:, :2], tenant=tenant, max_new_tokens=1).result()
    assert steps_of(engine, tenant=0) == first


def test_predictions_of_earlier_weights_do_not_change_the_text(model: PreTrainedModel) -> None:
    lookahead.generate(model, PROMPT, **OPTIONS)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    expected = model.generate(PROMPT, **OPTIONS).sequences
    for _ in range(2):
        assert torch.equal(lookahead.generate(model, PROMPT, **OPTIONS).sequences, expected)
