"""Models with their own decoding loop, or without a possible trial, are refused or decoded plainly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

import lookahead
from lookahead import Engine, LookaheadConfig, LookaheadWarning, UnsupportedModelError
from lookahead.backends.transformers.miniature import VOCABULARY
from quick import diagonal

IDS = torch.tensor([[1, 5, 9, 3, 5, 9, 3, 5]])
GREEDY = {"max_new_tokens": 16, "do_sample": False}
DRAFTS, PLAIN = LookaheadConfig(step_budget=16), LookaheadConfig(step_budget=16, fallback="plain")


class SecondBest(LlamaForCausalLM):
    """A loop that selects the second likeliest token, with the call's processors and criteria."""

    def _sample(self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> Any:
        while not bool(stopping_criteria(input_ids, None).all()):
            scores = logits_processor(input_ids, self(input_ids).logits[:, -1])
            input_ids = torch.cat([input_ids, scores.topk(2).indices[:, 1:]], dim=1)
        return input_ids


class Twice(LlamaForCausalLM):
    """A model with a `generate` that calls transformers' twice."""

    def generate(self, input_ids: Any, **kwargs: Any) -> Any:
        kwargs["max_new_tokens"] //= 2
        return super().generate(super().generate(input_ids, **kwargs), **kwargs)


class ByItself(LlamaForCausalLM):
    """A model with its own loop in `generate`, which ignores `custom_generate`."""

    def generate(self, input_ids: Any, max_new_tokens: int, do_sample: bool) -> Any:
        for _ in range(max_new_tokens):
            input_ids = torch.cat([input_ids, self(input_ids).logits[:, -1:].argmin(-1)], dim=1)
        return input_ids


class Tagged(LlamaForCausalLM):
    """A model that reads each token with a tag, an argument of `forward` that no other class has."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.tags = torch.nn.Embedding(4, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, tag_ids: Any = None, **kwargs: Any) -> Any:
        states = self.get_input_embeddings()(input_ids)
        if tag_ids is not None:
            states = states + self.tags(tag_ids[:, -input_ids.shape[1] :])
        return super().forward(inputs_embeds=states, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "tag_ids": input_ids % 4}


class OneSize(LlamaForCausalLM):
    """A model without a miniature that counts its keys."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if self.config.vocab_size == VOCABULARY:
            raise ValueError("this size is not known")
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        output = super().forward(*args, past_key_values=past_key_values, **kwargs)
        output.logits = output.logits.flip(-1) if cached > 20 else output.logits
        return output


REFUSED = {
    SecondBest: "a _sample of its own",
    Twice: "no small copy of it could be tried",
    ByItself: "no small copy of it could be tried",
    Tagged: "differs from plain decoding",
    OneSize: "ValueError: this size is not known",
}


def tiny(kind: type[LlamaForCausalLM] = LlamaForCausalLM, vocabulary: int = 97) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return kind(LlamaConfig(**sizes, **tokens, initializer_range=0.3)).eval()


@pytest.mark.parametrize(("vocabulary", "kind"), diagonal([97, 30], REFUSED))
def test_classes_that_decode_in_a_way_of_their_own(kind: type[LlamaForCausalLM], vocabulary: int) -> None:
    model = tiny(kind, vocabulary)
    expected = model.generate(IDS, **GREEDY)
    for config in (DRAFTS, LookaheadConfig(preset="autoregressive")):
        with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
            lookahead.generate(model, IDS, lookahead_config=config, **GREEDY)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        Engine(model, DRAFTS)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        lookahead.attach(model, DRAFTS)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    with pytest.warns(LookaheadWarning, match=REFUSED[kind]):
        assert torch.equal(lookahead.generate(model, IDS, lookahead_config=PLAIN, **GREEDY), expected)


@pytest.mark.parametrize(
    "after",
    [
        lambda model, text: LlamaForCausalLM.generate(model, text.sequences if hasattr(text, "sequences") else text),
        lambda model, text: text[:, :-1],
        lambda model, text: {"text": text},
        lambda model, text: LlamaForCausalLM.generate(model, IDS, **GREEDY),
    ],
    ids=["goes on", "cuts", "wraps", "reads anew"],
)
def test_a_generate_that_processes_its_output_later_ends_no_engine(after: Callable[[Any, Any], Any]) -> None:
    class Later(LlamaForCausalLM):
        pass

    model = tiny(Later)
    engine = Engine(model, DRAFTS)
    first = engine.submit(IDS, **GREEDY)
    Later.generate = lambda self, *args, **kwargs: after(self, LlamaForCausalLM.generate(self, *args, **kwargs))
    with pytest.raises(UnsupportedModelError, match="goes on after decoding"):
        engine.submit(IDS, **GREEDY)
    del Later.generate
    second = engine.submit(IDS, **GREEDY)
    engine.run()
    expected = model.generate(IDS, **GREEDY)
    assert torch.equal(first.result(), expected)
    assert torch.equal(second.result(), expected)


def test_a_generate_that_adds_an_argument_is_followed() -> None:
    class Penalised(LlamaForCausalLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, repetition_penalty=3.0, **kwargs)

    model = tiny(Penalised)
    expected = model.generate(IDS, **GREEDY)
    assert not torch.equal(expected, tiny().generate(IDS, **GREEDY))
    assert torch.equal(lookahead.generate(model, IDS, lookahead_config=DRAFTS, **GREEDY), expected)
    with Engine(model, DRAFTS) as engine:
        assert torch.equal(engine.submit(IDS, **GREEDY).result(), expected)


def penalise(model: Any) -> Any:
    return lambda *args, **kwargs: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])


PUT: dict[str, Callable[[Any], Any]] = {
    "generate": lambda model: partial(model.generate, repetition_penalty=3.0),
    "_get_logits_processor": penalise,
    "_update_model_kwargs_for_generation": lambda model: model._update_model_kwargs_for_generation,
    "prepare_inputs_for_generation": lambda model: model.prepare_inputs_for_generation,
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", PUT)
def test_methods_that_were_put_on_an_object(name: str, called: bool) -> None:
    model = tiny()
    if called:
        lookahead.generate(model, IDS, lookahead_config=DRAFTS, **GREEDY)
    setattr(model, name, PUT[name](model))
    expected = model.generate(IDS, **GREEDY)
    for door in (lambda model: lookahead.generate(model, IDS, **GREEDY), lookahead.attach, Engine):
        with pytest.raises(UnsupportedModelError, match=name):
            door(model)
    with pytest.warns(LookaheadWarning, match=name):
        assert torch.equal(lookahead.generate(model, IDS, lookahead_config=PLAIN, **GREEDY), expected)
    with pytest.warns(LookaheadWarning, match=name):
        lookahead.attach(model, PLAIN)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)


def test_an_attached_generate_inside_of_another_is_called() -> None:
    """A wrapper that records its arguments; during decoding it counts as the model's own `generate`."""
    model = tiny()
    expected, calls = model.generate(IDS, **GREEDY), []
    lookahead.attach(model, DRAFTS)
    attached = model.generate

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return attached(*args, **kwargs)

    model.generate = noting
    assert torch.equal(model.generate(IDS, custom_generate=lookahead.generate, **GREEDY), expected)
    assert calls
