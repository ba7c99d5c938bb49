"""The cache under either name: `past_key_values`, and `cache` as in transformers from 5.24."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import lookahead
from lookahead import Engine
from lookahead.backends.transformers import TRANSFORMERS
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from model_zoo import build
from tiny.families import build as build_family
from tiny.variant import Variant

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
NAMES = ("cache", "past_key_values")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("door", ["generate", "attach", "custom_generate"])
def test_a_call_goes_on_from_a_cache_under_either_name(prompt: torch.Tensor, name: str, door: str) -> None:
    if door == "custom_generate" and name != CACHE and TRANSFORMERS < (5, 24):
        pytest.skip("transformers refuses the name before it calls a custom function")
    model = build("llama")
    whole = model.generate(prompt, **{**GREEDY, "max_new_tokens": 16})
    first = lookahead.generate(model, prompt, return_dict_in_generate=True, **GREEDY)
    assert isinstance(first.cache, DynamicCache)
    assert first.past_key_values is first.cache
    cache_argument = {name: first.cache}
    if door == "generate":
        text = lookahead.generate(model, first.sequences, **cache_argument, **GREEDY)
    elif door == "attach":
        lookahead.attach(model)
        text = model.generate(first.sequences, **cache_argument, **GREEDY)
        lookahead.detach(model)
    else:
        text = model.generate(first.sequences, custom_generate=lookahead.generate, **cache_argument, **GREEDY)
    assert torch.equal(text, whole)


def test_two_caches_are_refused(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="cache and past_key_values are two names"):
        lookahead.generate(llama, prompt, cache=DynamicCache(), past_key_values=DynamicCache(), **GREEDY)
    text = lookahead.generate(llama, prompt, cache=None, past_key_values=DynamicCache(), **GREEDY)
    assert torch.equal(text, llama.generate(prompt, **GREEDY))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_refuses_a_cache_under_either_name(llama: PreTrainedModel, prompt: torch.Tensor, name: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match="is not supported by an Engine"):
        Engine(llama).submit(prompt, **{name: DynamicCache()}, **GREEDY)


@pytest.mark.parametrize("kind", ["llama", "mamba2", "bart/encoder", "rwkv"])
def test_no_call_of_ours_uses_a_deprecated_name(prompt: torch.Tensor, kind: str, caplog: Any) -> None:
    model = build_family(kind, Variant(), "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        options = {**GREEDY, "num_beams": 1, "pad_token_id": 0}
        output = lookahead.generate(model, prompt, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, model.generate(prompt, **options))
    assert "deprecated" not in caplog.text
