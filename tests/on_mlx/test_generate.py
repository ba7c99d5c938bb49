"""Models of mlx-lm through `lookahead.generate` and the engine: texts of mlx-lm, samples of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed; `make test-mlx` installs it, and runs these tests")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from transformers import DynamicCache

import lookahead
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.backends.mlx.model import MLXModel
from lookahead.demo import demo_model_path
from mlx_zoo import VOCABULARY, build_mlx, build_module, tokenizer

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = torch.tensor([[(7 * place * place + 3) % VOCABULARY for place in range(23)] * 2])
CONFIGS = [
    LookaheadConfig(),
    LookaheadConfig(step_budget=16),
    LookaheadConfig(preset="paper", window_size=4, ngram_size=3, guess_set_size=4),
    LookaheadConfig(preset="jacobi"),
    LookaheadConfig(preset="token_recycling"),
    LookaheadConfig(preset="autoregressive"),
]


def of_mlx(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """Greedy tokens of mlx-lm."""
    words = tokenizer()
    return [answer.token for answer in mlx_lm.stream_generate(model.mlx, words, prompt[0].tolist(), max_tokens=count)]


def new_tokens(model: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    output = lookahead.generate(model, prompt, **{"max_new_tokens": 40, "do_sample": False} | options)
    return output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.preset}-{config.max_nodes}")
@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss"])
def test_texts_equal_mlx_lm_and_plain_decoding(architecture: str, config: LookaheadConfig) -> None:
    model = build_mlx(architecture)
    if architecture == "gpt_oss" and config.preset == "paper":
        with pytest.raises(UnsupportedArgumentError, match="preset"):
            new_tokens(model, PROMPT, lookahead_config=config)
        return
    expected = of_mlx(model, PROMPT, 40)
    assert new_tokens(model, PROMPT, lookahead_config=config) == expected
    assert model.generate(PROMPT, max_new_tokens=40, do_sample=False)[0, PROMPT.shape[1] :].tolist() == expected


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_rows_of_a_batch_and_an_engine_equal_single_texts(architecture: str) -> None:
    model = build_mlx(architecture)
    prompts = [PROMPT, PROMPT[:, 5:30], PROMPT[:, :31], PROMPT[:, :40]]
    expected = [of_mlx(model, prompt, 30) for prompt in prompts]
    width = max(prompt.shape[1] for prompt in prompts)
    padded = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.arange(width)[None] >= width - prompt.shape[1] for prompt in prompts]).long()
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "lookahead_config": CONFIGS[1]}
    output = lookahead.generate(model, padded, attention_mask=mask, pad_token_id=0, **options)
    assert output[:, width:].tolist() == expected
    with Engine(model, config=CONFIGS[1], max_rows=3) as engine:
        for _ in range(2):  # the second time, beginnings are in the prefix cache
            handles = [engine.submit(prompt, max_new_tokens=30, do_sample=False) for prompt in prompts]
            outputs = [handle.result() for handle in handles]
            found = [out[0, prompt.shape[1] :].tolist() for out, prompt in zip(outputs, prompts, strict=True)]
            assert found == expected


def test_a_folder_gives_the_texts_of_mlx_lm(tmp_path: Path) -> None:
    mlx_lm.convert(str(demo_model_path()), str(tmp_path / "demo"))
    model = lookahead.load_mlx(tmp_path / "demo")
    text = "class Stack:\n    def __init__(self):\n        self.items"
    prompt = model.tokenizer(text, return_tensors="pt").input_ids
    answers = mlx_lm.stream_generate(model.mlx, model.mlx_tokenizer, text, max_tokens=24)
    assert new_tokens(model, prompt, max_new_tokens=24, lookahead_config=CONFIGS[1]) == [one.token for one in answers]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights(bits: int) -> None:
    module = build_module("qwen3")
    nn.quantize(module, group_size=32, bits=bits)
    model = MLXModel(module, tokenizer())
    assert model.way == "trees"
    assert new_tokens(model, PROMPT, lookahead_config=CONFIGS[1]) == of_mlx(model, PROMPT, 40)


class _Forgetful(nn.Module):
    """A model whose logits depend on the number of tokens in a pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.layers = inner.layers

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        return self.inner(inputs, cache=cache) * mx.arange(VOCABULARY) * (inputs.size % 5)


def test_what_is_not_exact_is_refused(tmp_path: Path) -> None:
    model = build_mlx("llama")
    with pytest.raises(UnsupportedModelError, match="token trees and on chains"):
        MLXModel(_Forgetful(model.mlx), tokenizer())
    for config, words in (
        (LookaheadConfig(pack_weights=True), "pack_weights"),
        (LookaheadConfig(invariant=True), "invariant"),
        (LookaheadConfig(engine="static"), "engine"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            new_tokens(model, PROMPT, lookahead_config=config)
    for cache, error in (
        (make_prompt_cache(model.mlx), InvalidArgumentError),
        (DynamicCache(), UnsupportedArgumentError),
    ):
        with pytest.raises(error, match="cache"):
            new_tokens(model, PROMPT, past_key_values=cache)
    with pytest.raises(InvalidArgumentError, match="cannot be loaded"):
        lookahead.load_mlx(tmp_path)
