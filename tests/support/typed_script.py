"""A user's script; `tests/api/test_types.py` checks it with mypy, with and without transformers' types."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typing_extensions import assert_type

import lookahead
from lookahead import Engine, LookaheadConfig, LookaheadOutput, NGramPool, Statistics, StepRecord, TokenEvent, Trace

folder = str(lookahead.demo.demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt: torch.Tensor = tokenizer("def add(a, b):", return_tensors="pt").input_ids


def show(record: StepRecord) -> None:
    print(record.step, record.tokens)


paper = LookaheadConfig(preset="paper", window_size=3, fallback="plain", engine="dynamic", memory="request")
texts = lookahead.generate(model, prompt, lookahead_config=paper, on_step=show, max_new_tokens=20)
assert_type(texts, torch.Tensor)
assert_type(lookahead.generate(model, prompt, return_dict_in_generate=False, max_new_tokens=20), torch.Tensor)

output = lookahead.generate(
    model, prompt, ngram_pool=NGramPool(5, 15), prediction=[1, 2], return_dict_in_generate=True, max_new_tokens=20
)
assert_type(output, LookaheadOutput)
assert_type(output.statistics, Statistics)
assert_type(output.statistics.step_compression, float)
print(tokenizer.decode(output.sequences[0]), output.past_key_values, output.cache)


def with_settings(settings: GenerationConfig) -> None:
    output = lookahead.generate(model, prompt, generation_config=settings)
    assert_type(output, torch.Tensor | LookaheadOutput)


def returns_dict(as_dict: bool) -> torch.Tensor | LookaheadOutput:
    return lookahead.generate(model, prompt, return_dict_in_generate=as_dict)


trace = Trace("trace.html", tokenizer)
lookahead.attach(model, LookaheadConfig(trace=trace))
lookahead.detach(model)

with Engine(model, LookaheadConfig(step_budget=16), max_rows=4) as engine:
    handle = engine.submit(prompt, seed=1, logprobs=2, max_new_tokens=20)
    for token in handle:
        assert_type(token, int)
    for event in handle.events():
        assert_type(event, TokenEvent)

try:
    LookaheadConfig.from_dict({"preset": "papr"})
except lookahead.InvalidArgumentError as error:
    print(error)
