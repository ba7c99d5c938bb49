"""Prompts with images in an engine, beside others: each text is that of transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fuzz.families import build
from fuzz.images import IMAGE_TOKEN, image_prompt
from fuzz.variant import Variant
from lookahead import LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.serving import Engine, RequestHandle
from quick import quickly

FAMILIES = ["gemma3", "mistral3/multimodal", "qwen2_5_vl/multimodal", "qwen3_vl/multimodal", "llava/multimodal"]
TEXT = [5, 6, 7, 8, 9, 10, 11, 6, 7, 8, 9, 10]
LENGTH = 24


def tiny(family: str) -> PreTrainedModel:
    return build(family, Variant(window=12), "sdpa")


def prompts(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Two images behind the same tokens, other text behind the first one, and text alone that begins like all."""
    text = torch.tensor([TEXT * 2])
    seeds = [
        image_prompt(model, [TEXT * 2], 0),
        image_prompt(model, [TEXT * 2], 1),
        image_prompt(model, [TEXT[::-1]], 0),
    ]
    return [*seeds, {"input_ids": text, "attention_mask": torch.ones_like(text)}]


def alone(model: PreTrainedModel, inputs: dict[str, Any], seed: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    text: torch.Tensor = type(model).generate(model, **inputs, max_new_tokens=LENGTH, **options)
    return text


def submitted(engine: Engine, inputs: dict[str, Any], seed: int, **options: Any) -> RequestHandle:
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return engine.submit(inputs["input_ids"], **rest, seed=seed, max_new_tokens=LENGTH, **options)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9}])
@pytest.mark.parametrize("family", quickly(FAMILIES, ["gemma3", "qwen2_5_vl/multimodal", "llava/multimodal"]))
def test_each_text_is_that_of_its_own_image(family: str, options: dict[str, Any]) -> None:
    model = tiny(family)
    expected = [alone(model, inputs, seed, **options) for seed, inputs in enumerate(prompts(model))]
    engine = Engine(model, LookaheadConfig(step_budget=16, memory="process"), max_rows=3)
    for _ in range(2):  # again, when the engine has kept the texts of all
        handles = [submitted(engine, inputs, seed, **options) for seed, inputs in enumerate(prompts(model))]
        for handle, text in zip(handles, expected, strict=True):
            assert torch.equal(handle.result(), text)
    assert not any(handle.statistics.reused_tokens for handle in handles[:3]), "keys and values of an image are its own"


def test_a_request_that_had_to_wait_again_reads_its_image_again() -> None:
    model = tiny("qwen2_5_vl/multimodal")
    inputs = prompts(model)[:2]
    expected = [alone(model, case, 0, do_sample=False) for case in inputs]
    config = LookaheadConfig(step_budget=4)
    size = Engine(model, config)._memory.token_bytes
    longest = max(text.shape[1] for text in expected)
    engine = Engine(model, config, kv_bytes=(longest + 40) * size, prefix_cache=False)
    handles = [submitted(engine, case, 0, do_sample=False) for case in inputs]
    for handle, text in zip(handles, expected, strict=True):
        assert torch.equal(handle.result(), text)
    assert engine.statistics.preempted > 0


def test_what_cannot_be_read_ends_its_own_request() -> None:
    model = tiny("qwen2_5_vl/multimodal")
    image, _, _, text = prompts(model)
    expected, shape = alone(model, text, 0, do_sample=False), image["input_ids"].shape
    end = int((image["input_ids"][0] == IMAGE_TOKEN).nonzero()[-1]) + 1
    cut = {name: value[:, :end] if value.shape == shape else value for name, value in image.items()}
    engine = Engine(model)
    broken, other = submitted(engine, cut, 0, do_sample=False), submitted(engine, text, 0, do_sample=False)
    assert torch.equal(other.result(), expected)
    with pytest.raises(UnsupportedModelError, match="inside of an image"):
        broken.result()


def test_images_of_models_with_a_running_state_are_refused() -> None:
    model = tiny("qwen3_5/multimodal")
    with pytest.raises(UnsupportedArgumentError, match="running state"):
        submitted(Engine(model), image_prompt(model, [TEXT], 0), 0, do_sample=False)
