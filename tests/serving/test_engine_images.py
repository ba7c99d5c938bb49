"""Prompts with images in an engine, with other requests: each text equals `model.generate`."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import lookahead
from compared.doors import token_bytes
from lookahead import LookaheadConfig, ModelChangedError, UnsupportedArgumentError, UnsupportedModelError
from lookahead.serving import Engine, RequestHandle
from model_zoo import build as zoo_model
from quick import diagonal, quickly
from tiny.families import build
from tiny.images import IMAGE_TOKEN, image_prompt
from tiny.variant import Variant

FAMILIES = ["gemma3", "mistral3/multimodal", "qwen2_5_vl/multimodal", "qwen3_vl/multimodal", "llava/multimodal"]
TEXT = [5, 6, 7, 8, 9, 10, 11, 6, 7, 8, 9, 10]
LENGTH = 24


def tiny(family: str) -> PreTrainedModel:
    return build(family, Variant(window=12), "sdpa")


def prompts(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return prompts with equal beginnings: two images, the first image with another text, and only text."""
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


@pytest.mark.parametrize(
    ("family", "options"), diagonal(FAMILIES, [{"do_sample": False}, {"do_sample": True, "temperature": 0.9}])
)
def test_each_text_is_that_of_its_own_image(family: str, options: dict[str, Any]) -> None:
    model = tiny(family)
    expected = [alone(model, inputs, seed, **options) for seed, inputs in enumerate(prompts(model))]
    engine = Engine(model, LookaheadConfig(step_budget=16, memory="process"), max_rows=3)
    for _ in range(2):  # the second time with all texts in the prefix cache
        handles = [submitted(engine, inputs, seed, **options) for seed, inputs in enumerate(prompts(model))]
        for handle, text in zip(handles, expected, strict=True):
            assert torch.equal(handle.result(), text)
    assert not any(handle.statistics.reused_tokens for handle in handles[:3]), "keys and values of an image are its own"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_an_image_behind_more_text_than_a_window_shows(family: str) -> None:
    """The last token of a cached prompt is sent again, with the same visible tokens."""
    model = build(family, Variant(seed=1, window=3, embedding_gain=3.0), "eager")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    for tokens in range(3, 9):
        inputs = image_prompt(model, [list(range(5, 5 + tokens))], tokens)
        expected = model.generate(**inputs, **options)
        arguments = {name: value for name, value in inputs.items() if name != "attention_mask"}
        engine = Engine(model, LookaheadConfig(step_budget=8))
        assert torch.equal(engine.submit(arguments.pop("input_ids"), **arguments, **options).result(), expected)


def test_a_request_that_had_to_wait_again_reads_its_image_again() -> None:
    model = tiny("qwen2_5_vl/multimodal")
    inputs = prompts(model)[:2]
    expected = [alone(model, case, 0, do_sample=False) for case in inputs]
    config = LookaheadConfig(step_budget=4)
    size = token_bytes(model)
    longest = max(text.shape[1] for text in expected)
    engine = Engine(model, config, kv_bytes=(longest + 40) * size, prefix_cache=False)
    handles = [submitted(engine, case, 0, do_sample=False) for case in inputs]
    for handle, text in zip(handles, expected, strict=True):
        assert torch.equal(handle.result(), text)
    assert engine.statistics.preempted > 0


NOTING = ["qwen2_vl/multimodal", "qwen2_5_vl/multimodal", "qwen3_vl/multimodal", "glm4v/multimodal"]
"""Classes with a `generate` that stores the position offset after images on the model."""


@pytest.mark.parametrize("family", quickly(NOTING, ["qwen2_vl/multimodal", "glm4v/multimodal"]))
def test_attributes_that_generate_sets_for_one_request_are_no_change_for_others(family: str) -> None:
    model = tiny(family)
    cases = prompts(model)
    expected = [alone(model, case, 0, do_sample=False) for case in cases]
    for order in ([0, 3, 1], [3, 0, 3], [1, 3, 2]):
        engine = Engine(model, LookaheadConfig(step_budget=4), max_rows=4)
        handles = []
        for case in order:
            handles.append(submitted(engine, cases[case], 0, do_sample=False))
            engine.step()
            engine.step()
        lookahead.generate(
            model, **cases[2], max_new_tokens=2, do_sample=False
        )  # sets the attribute of the model itself
        for handle, case in zip(handles, order, strict=True):
            assert torch.equal(handle.result(), expected[case])


def test_threads_that_submit_images_and_texts_while_another_one_steps_get_their_own_texts() -> None:
    model = tiny("qwen2_vl/multimodal")
    cases = prompts(model)
    expected = [alone(model, case, 0, do_sample=False) for case in cases]
    with Engine(model, LookaheadConfig(step_budget=8), max_rows=3) as engine, ThreadPoolExecutor(2) as pool:
        order = [0, 3, 1, 2, 3, 0, 3, 3, 2, 1, 3, 0]
        handles = list(pool.map(lambda case: submitted(engine, cases[case], 0, do_sample=False), order))
        for handle, case in zip(handles, order, strict=True):
            assert torch.equal(handle.result(), expected[case])


def test_an_image_that_waits_while_the_model_changes_is_read_by_the_changed_model() -> None:
    model = tiny("qwen2_vl/multimodal")
    image, _, _, text = prompts(model)
    before = alone(model, image, 0, do_sample=False)
    engine = Engine(model, LookaheadConfig(step_budget=4), max_rows=1)
    first, waits = submitted(engine, text, 0, do_sample=False), submitted(engine, image, 0, do_sample=False)
    engine.step()
    assert not waits.tokens
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    layers = model.model.language_model.layers
    layers[0], layers[1] = layers[1], layers[0]
    after = alone(model, image, 0, do_sample=False)
    assert not torch.equal(before, after)
    assert torch.equal(waits.result(), after)
    with pytest.raises(ModelChangedError):
        first.result()


class Noting(LlamaForCausalLM):
    """A class with a `generate` that sets attributes of the model and of a module, and reads one of them."""

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        self.model.layers[0].requests = [*getattr(self.model.layers[0], "requests", []), kwargs]
        self.latest = object()
        return super()._prepare_generation_config(*args, **kwargs)


def test_attributes_that_a_class_sets_in_generate_are_no_change() -> None:
    model = copy.deepcopy(zoo_model("llama"))
    model.__class__ = Noting
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    texts = [torch.tensor([TEXT]), torch.tensor([TEXT[::-1]])]
    expected = [model.generate(text, **options) for text in texts]
    engine = Engine(model, LookaheadConfig(step_budget=2))
    handles = []
    for text in texts:
        handles.append(engine.submit(text, **options))
        engine.step()
    for handle, text in zip(handles, expected, strict=True):
        assert torch.equal(handle.result(), text)


def test_an_unreadable_prompt_ends_only_its_own_request() -> None:
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
