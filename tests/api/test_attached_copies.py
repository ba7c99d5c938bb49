"""Copies of an attached model, and files of it, generate with their own weights."""

import copy
import functools
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from model_zoo import build

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
GREEDY = {"max_new_tokens": 20, "do_sample": False}
# One step per token: twenty steps show that this configuration is in use.
CONFIG = LookaheadConfig(preset="autoregressive")


def through_torch(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: PreTrainedModel = torch.load(file, weights_only=False)
    return loaded


def averaged(model: PreTrainedModel) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).module


COPIES: list[Callable[[PreTrainedModel], Any]] = [
    copy.deepcopy,
    averaged,
    lambda model: pickle.loads(pickle.dumps(model)),
    through_torch,
]


@pytest.fixture
def attached() -> PreTrainedModel:
    model = copy.deepcopy(build("llama"))
    lookahead.attach(model, CONFIG)
    return model


def steps(model: Any, **options: Any) -> int | None:
    output = model.generate(PROMPT, return_dict_in_generate=True, **GREEDY, **options)
    return output.statistics.steps if hasattr(output, "statistics") else None


@pytest.mark.parametrize("make", COPIES)
def test_a_copy_has_its_own_weights(make: Callable[[PreTrainedModel], Any], attached: PreTrainedModel) -> None:
    before = build("llama").generate(PROMPT, **GREEDY)
    other = make(attached)
    assert torch.equal(other.generate(PROMPT, **GREEDY), before)
    assert steps(other) == 20
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    text = other.generate(PROMPT, **GREEDY)
    lookahead.detach(other)
    assert torch.equal(text, other.generate(PROMPT, **GREEDY))
    assert not torch.equal(text, before)
    assert steps(other) is None, "the copy is detached"
    assert steps(attached) == 20, "and the model is not"
    assert torch.equal(attached.generate(PROMPT, **GREEDY), before)


def test_a_shallow_copy(attached: PreTrainedModel) -> None:
    other = copy.copy(attached)
    assert steps(other) == 20
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    text = other.generate(PROMPT, **GREEDY)
    lookahead.detach(other)
    assert torch.equal(text, other.generate(PROMPT, **GREEDY))
    assert steps(other) is None
    assert steps(attached) == 20
    other.generation_config = copy.deepcopy(other.generation_config)
    other.generation_config.max_new_tokens = 3
    lookahead.attach(other, CONFIG)
    assert other.generate(PROMPT, do_sample=False).shape[1] == PROMPT.shape[1] + 3


def test_save_pretrained(attached: PreTrainedModel, tmp_path: Path) -> None:
    attached.save_pretrained(tmp_path)
    loaded = type(attached).from_pretrained(tmp_path)
    assert steps(loaded) is None
    assert torch.equal(loaded.generate(PROMPT, **GREEDY), attached.generate(PROMPT, **GREEDY))


def test_a_wrapped_model() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(build("llama")), config).eval()
    lookahead.attach(model, CONFIG)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "lora_B" in name:
                weight.mul_(-20)
    text = other.generate(input_ids=PROMPT, **GREEDY)
    assert not torch.equal(text, model.generate(input_ids=PROMPT, **GREEDY))
    lookahead.detach(other)
    assert torch.equal(text, other.generate(input_ids=PROMPT, **GREEDY))


def test_a_copy_of_a_copy_after_use(attached: PreTrainedModel) -> None:
    """Packed weights belong to one model object; copies make their own."""
    attached.generate(PROMPT, lookahead_config=LookaheadConfig(pack_weights=True), **GREEDY)
    other = copy.deepcopy(copy.deepcopy(attached))
    other.lm_head.weight.data.copy_(other.lm_head.weight.flip(0))
    text = other.generate(PROMPT, lookahead_config=LookaheadConfig(pack_weights=True), **GREEDY)
    lookahead.detach(other)
    assert torch.equal(text, other.generate(PROMPT, **GREEDY))


def test_attached_models_go_when_they_are_no_longer_used(attached: PreTrainedModel) -> None:
    other = copy.deepcopy(attached)
    other.generate(PROMPT, lookahead_config=LookaheadConfig(pack_weights=True), **GREEDY)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_the_signature_is_that_of_transformers(attached: PreTrainedModel) -> None:
    plain = type(attached).generate
    assert inspect.signature(attached.generate) == inspect.signature(plain)
    assert attached.generate.__doc__ == plain.__doc__
    assert copy.deepcopy(attached).generate.__name__ == "generate"


@pytest.mark.parametrize("keeps_names", [False, True])
def test_a_function_around_an_attached_generate(attached: PreTrainedModel, keeps_names: bool) -> None:
    """Monitoring wraps `generate`, with `functools.wraps` or without."""
    generate: Any = attached.generate
    calls = []

    def monitored(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return generate(*args, **kwargs)

    attached.generate = functools.wraps(generate)(monitored) if keeps_names else monitored
    assert torch.equal(attached.generate(PROMPT, **GREEDY), type(attached).generate(attached, PROMPT, **GREEDY))
    assert steps(attached) == 20
    assert len(calls) == 2
