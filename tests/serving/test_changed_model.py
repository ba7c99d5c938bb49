"""A running Engine follows its model: after any change its texts equal `model.generate` with the changed model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaMLP

import lookahead
from lookahead import (
    Engine,
    InvalidArgumentError,
    LookaheadConfig,
    ModelChangedError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from lookahead.server.errors import as_api_error
from model_zoo import build
from quick import diagonal, quickly

PROMPT = [3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 5, 8, 1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A new tiny random Llama for each test."""
    method, body = LlamaMLP.forward, LlamaMLP.forward.__code__
    yield copy.deepcopy(build("llama"))
    method.__code__ = body  # see `edited_code`


def plain(model: PreTrainedModel) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), **OPTIONS)[0].tolist()


def served(engine: Engine) -> list[int]:
    return engine.submit(PROMPT, **OPTIONS).result()[0].tolist()


def written_token(model: PreTrainedModel) -> int:
    """Return a token of the text; a change of its row changes the text, but few bits."""
    return plain(model)[len(PROMPT)]


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)


def through_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data.mul_(-1)


def row_through_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[written_token(model)] *= -1


def row_through_numpy(model: PreTrainedModel) -> None:
    model.lm_head.weight.detach().numpy()[written_token(model)] *= -1


def row_in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        model.lm_head.weight[written_token(model)] *= -1


def other_memory(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).contiguous()


def other_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))


def other_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def hook(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * -2)


def rotary_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq *= 3


def rotary_row_through_numpy(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.numpy()[0] = 5


def rotary_setting(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def edited_code(model: PreTrainedModel) -> None:
    """Edit a method as IPython's autoreload does."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        negative: torch.Tensor = -self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return negative

    LlamaMLP.forward.__code__ = forward.__code__


CHANGES = [
    edited_code,
    in_place,
    through_data,
    row_through_data,
    row_through_numpy,
    row_in_inference_mode,
    other_memory,
    other_parameter,
    other_module,
    hook,
    rotary_buffer,
    rotary_row_through_numpy,
    rotary_setting,
]
UNCOUNTED = (row_through_data, row_through_numpy, row_in_inference_mode, rotary_row_through_numpy)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefixes": {"prefix_cache": False},
    "packed": {"config": LookaheadConfig(pack_weights=True)},
    "packed, no prefixes": {"config": LookaheadConfig(pack_weights=True), "prefix_cache": False},
}


@pytest.mark.parametrize(("change", "settings"), diagonal(CHANGES, SETTINGS))
def test_the_next_request_is_of_the_changed_model(
    model: PreTrainedModel, change: Callable[[PreTrainedModel], None], settings: str
) -> None:
    engine = Engine(model, **SETTINGS[settings])
    before = plain(model)
    assert served(engine) == before
    change(model)
    expected = plain(model)
    assert expected != before, "the change must change the text"
    assert served(engine) == expected


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_adapters_are_followed(model: PreTrainedModel, prefix_cache: bool) -> None:
    peft = pytest.importorskip("peft")
    sizes = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **sizes), adapter_name="one")
    adapted.add_adapter("two", peft.LoraConfig(r=8, **sizes))
    adapted.eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.mul_(4)
    engine = Engine(model, prefix_cache=prefix_cache)
    texts = [served(engine)]
    assert texts[-1] == plain(model)
    adapted.set_adapter("two")
    texts.append(served(engine))
    assert texts[-1] == plain(model)
    with adapted.disable_adapter():
        texts.append(served(engine))
        assert texts[-1] == plain(model)
    assert served(engine) == plain(model) == texts[1]
    for layer in adapted.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(-3.0)
    texts.append(served(engine))
    assert texts[-1] == plain(model)
    assert len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize("change", quickly(CHANGES, [edited_code, in_place, through_data, hook]))
def test_a_text_that_would_be_mixed_ends_with_an_error(
    model: PreTrainedModel, change: Callable[[PreTrainedModel], None]
) -> None:
    if change in UNCOUNTED:
        pytest.skip("a part of a weight that torch counts no write of is found when the engine begins anew")
    engine = Engine(model, LookaheadConfig(step_budget=4), prompt_tokens=24)
    begun = engine.submit(PROMPT, **OPTIONS)
    engine.step()
    written = begun.tokens
    half_read = engine.submit([7, *PROMPT, *PROMPT], **OPTIONS)
    engine.step()
    waiting = engine.submit(PROMPT, **OPTIONS)
    assert written
    assert not begun.done
    assert not half_read.tokens
    change(model)
    engine.run()
    with pytest.raises(ModelChangedError, match=rf"model changed after {len(begun.tokens)} tokens.*submit"):
        begun.result()
    assert begun.finish_reason == "error"
    assert waiting.result()[0].tolist() == plain(model)
    expected = model.generate(torch.tensor([[7, *PROMPT, *PROMPT]]), **OPTIONS)
    assert torch.equal(half_read.result(), expected)


@pytest.fixture
def double_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Changes caches, which permits only drafts of one path."""
    update = DynamicLayer.update
    return lambda: monkeypatch.setattr(
        DynamicLayer, "update", lambda self, keys, *rest, **named: update(self, 2 * keys, *rest, **named)
    )


def test_a_waiting_request_is_checked_and_drafted_for_the_changed_model(
    model: PreTrainedModel, double_keys: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, LookaheadConfig(step_budget=12))
    waiting = engine.submit(PROMPT, **OPTIONS)
    double_keys()
    expected = plain(model)
    assert waiting.result()[0].tolist() == expected
    monkeypatch.undo()
    long = engine.submit(PROMPT, **(OPTIONS | {"max_new_tokens": 20}))
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    model.config.rope_parameters = {**model.config.rope_parameters, **rope}
    model.config.max_position_embeddings = 32
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with pytest.raises(UnsupportedArgumentError, match="may reach 41 tokens: beyond 32"):
        long.result()


class _Tenant:
    """A tenant whose first hash calls a function, in the middle of `submit`."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._calls = [call]

    def __hash__(self) -> int:
        while self._calls:
            self._calls.pop()()
        return 0


def test_a_request_can_be_submitted_while_a_changed_model_is_opened(
    model: PreTrainedModel, double_keys: Callable[[], None]
) -> None:
    engine = Engine(model, LookaheadConfig(step_budget=12))
    engine.submit(PROMPT[:9], **OPTIONS)

    def change() -> None:
        double_keys()
        engine.step()

    handle = engine.submit(PROMPT, tenant=_Tenant(change), **OPTIONS)
    assert handle.result()[0].tolist() == plain(model)


def test_an_idle_engine_takes_the_lengths_of_the_changed_model() -> None:
    model = copy.deepcopy(build("gpt2"))
    engine = Engine(model, LookaheadConfig(step_budget=4))
    long, longer = {**OPTIONS, "max_new_tokens": 90}, torch.tensor([6 * PROMPT])
    with pytest.warns(UserWarning, match="no position"):
        assert len(engine.submit(PROMPT, **long).result()[0]) == 97
    with pytest.raises(InvalidArgumentError, match="context has 96"):
        engine.submit(longer, **OPTIONS)
    for positions, options in ((150, OPTIONS), (300, long)):
        model.config.max_position_embeddings = positions
        model.transformer.wpe = torch.nn.Embedding(positions, model.config.hidden_size)
        for block in model.transformer.h:
            block.attn.bias = torch.tril(torch.ones(1, 1, positions, positions, dtype=torch.bool))
        assert torch.equal(engine.submit(longer, **options).result(), model.generate(longer, **options))


def test_passes_and_calls_of_generate_are_no_change(tmp_path: Path) -> None:
    model = copy.deepcopy(build("llama_dynamic_rope"))
    engine = Engine(model, LookaheadConfig(step_budget=4))
    short = {"max_new_tokens": 8, "do_sample": False}  # longer texts change the frequencies
    expected = model.generate(torch.tensor([PROMPT]), **short)
    handle = engine.submit(PROMPT, **short)
    calls: list[Callable[[], object]] = [
        lambda: lookahead.attach(model),
        lambda: model.generate(torch.tensor([PROMPT]), **short),
        lambda: lookahead.detach(model),
        lambda: setattr(model, "generation_config", GenerationConfig.from_model_config(model.config)),
        lambda: engine.submit([5, 8, 2], do_sample=True, max_new_tokens=4),
        lambda: model.requires_grad_(False),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.generate(
            torch.tensor([PROMPT]), **short, output_hidden_states=True, return_dict_in_generate=True
        ),
        lambda: model.generate(torch.tensor([PROMPT]), **short, cache_implementation="static", disable_compile=True),
    ]
    for call in calls:
        engine.step()
        call()
    assert torch.equal(handle.result(), expected)
    reused = engine.submit(PROMPT, **short)
    assert torch.equal(reused.result(), expected)
    assert reused.statistics.reused_tokens == len(PROMPT) - 1


class Counting(torch.nn.Module):
    """An activation with a state that does not affect its output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("sizes", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes += inputs.shape[1]
        return torch.nn.functional.silu(inputs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # one runs a clone, the other the model itself
def test_a_state_that_passes_change_is_no_change(model: PreTrainedModel, attention: str) -> None:
    model.set_attn_implementation(attention)
    model.model.layers[0].mlp.act_fn = Counting()
    expected = plain(model)
    engine = Engine(model, LookaheadConfig(step_budget=4))
    assert [served(engine), served(engine)] == [expected, expected]
    assert engine.statistics.reused_tokens == len(PROMPT) - 1


def test_a_model_that_can_no_longer_be_run_ends_all_requests(model: PreTrainedModel) -> None:
    engine = Engine(model)
    before = plain(model)
    handle = engine.submit(PROMPT, **OPTIONS)
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    with pytest.raises(UnsupportedModelError, match="prepare_inputs_for_generation of its own"):
        engine.step()
    with pytest.raises(UnsupportedModelError):
        handle.result()
    del model.prepare_inputs_for_generation
    assert served(engine) == before


def test_a_changed_model_is_answered_with_503() -> None:
    assert as_api_error(ModelChangedError("the model changed")).status_code == 503
