"""Samples of `lookahead.generate` and of an `Engine` against `mlx_lm.stream_generate` under the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed; `make test-mlx` installs it, and runs these tests")

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_logits_processors, make_presence_penalty, make_sampler

import lookahead
from lookahead import Engine, LookaheadConfig
from mlx_zoo import VOCABULARY, build_mlx, tokenizer

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = [(7 * place * place + 3) % VOCABULARY for place in range(23)] * 2
DRAFTS = LookaheadConfig(step_budget=12)
WHOLE = {"repetition_context_size": 10**6}  # transformers' penalty sees the whole text
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.8}, {"temp": 0.8}, {}),
    ({"temperature": 0.7, "top_p": 0.9}, {"temp": 0.7, "top_p": 0.9}, {}),
    ({"temperature": 1.3, "min_p": 0.1, "top_k": 9}, {"temp": 1.3, "min_p": 0.1, "top_k": 9}, {}),
    ({"top_k": VOCABULARY}, {"temp": 1.0}, {}),
    ({"repetition_penalty": 1.4}, {"temp": 1.0}, {"repetition_penalty": 1.4, **WHOLE}),
    ({"sequence_bias": [[[4], 5.0], [[9], -3.0]]}, {"temp": 1.0}, {"logit_bias": {4: 5.0, 9: -3.0}}),
    ({"do_sample": False, "repetition_penalty": 1.4}, {}, {"repetition_penalty": 1.4, **WHOLE}),
]
"""Arguments of transformers, of `make_sampler`, and of `make_logits_processors`."""


def of_mlx(model: Any, seed: int, sampling: dict[str, Any], penalties: dict[str, Any], count: int = 40) -> list[int]:
    """Tokens of mlx-lm."""
    mx.random.seed(seed)
    options: dict[str, Any] = {"logits_processors": make_logits_processors(**penalties), "max_tokens": count}
    answers = mlx_lm.stream_generate(model.mlx, tokenizer(), PROMPT, sampler=make_sampler(**sampling), **options)
    return [answer.token for answer in answers]


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, "max_new_tokens": 40, **settings}


def generated(model: Any, config: LookaheadConfig, prompt: Any = None, **options: Any) -> list[list[int]]:
    prompt = torch.tensor([PROMPT]) if prompt is None else prompt
    output = lookahead.generate(model, prompt, lookahead_config=config, **arguments(options))
    return output[:, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("settings", "sampling", "penalties"), SETTINGS, ids=str)
def test_samples_equal_mlx_lm_under_one_seed(
    settings: dict[str, Any], sampling: dict[str, Any], penalties: dict[str, Any], dtype: Any
) -> None:
    model = build_mlx("qwen3", dtype=dtype)
    expected = [of_mlx(model, seed, sampling, penalties) for seed in (7, 8)]
    mx.random.seed(7)
    assert generated(model, DRAFTS, **settings) == expected[:1]
    mx.random.seed(5)
    state = mx.random.state[0].tolist()
    engine = Engine(model, config=DRAFTS, max_rows=3)
    handles = [engine.submit(PROMPT, seed=seed, **arguments(settings)) for seed in (7, 8, 7, 8)]
    engine.run()
    assert [handle.result()[0, len(PROMPT) :].tolist() for handle in handles] == expected * 2
    assert mx.random.state[0].tolist() == state  # requests have their own


@pytest.mark.parametrize("architecture", ["gpt_oss", "falcon_h1"])
def test_samples_on_chains(architecture: str) -> None:
    model = build_mlx(architecture)
    expected = of_mlx(model, 2**64 - 3, {"temp": 0.6}, {})
    with Engine(model, config=DRAFTS) as engine:
        assert engine.submit(PROMPT, seed=-3, **arguments({"temperature": 0.6})).result()[0, 46:].tolist() == expected


def test_rows_of_a_batch_have_samples_of_their_own() -> None:
    model = build_mlx("llama")
    prompt = torch.tensor([PROMPT, PROMPT])
    found = []
    for config in (DRAFTS, LookaheadConfig(preset="autoregressive"), DRAFTS):
        mx.random.seed(4)
        found.append(generated(model, config, prompt))
    found.append(generated(model, DRAFTS, prompt))
    assert found[0] == found[1] == found[2] != found[3]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("settings", [{"typical_p": 0.7, "temperature": 0.8}, {"no_repeat_ngram_size": 2}], ids=str)
def test_settings_that_mlx_lm_does_not_have(settings: dict[str, Any]) -> None:
    model = build_mlx("llama")
    found = []
    for config in (DRAFTS, LookaheadConfig(preset="autoregressive")):
        mx.random.seed(3)
        found.append(generated(model, config, **settings)[0])
    assert found[0] == found[1] != of_mlx(model, 3, {"temp": settings.get("temperature", 1.0)}, {})
    if "no_repeat_ngram_size" in settings:
        pairs = list(zip([*PROMPT, *found[0]], [*PROMPT, *found[0]][1:], strict=False))
        assert len(set(pairs[len(PROMPT) - 1 :])) == 40
        assert not set(pairs[len(PROMPT) - 1 :]) & set(pairs[: len(PROMPT) - 1])


def test_processors_of_a_program_and_scores() -> None:
    model = build_mlx("llama")

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, text[0, len(PROMPT) :].unique(), -1.0)

    def same(tokens: mx.array, logits: mx.array) -> mx.array:
        for token in set(tokens.tolist()[len(PROMPT) :]):
            logits[:, token] = -1.0
        return logits

    mx.random.seed(6)
    options = arguments({"return_dict_in_generate": True, "output_scores": True})
    processors = {"logits_processor": [processor], "lookahead_config": DRAFTS}
    output = lookahead.generate(model, torch.tensor([PROMPT]), **options, **processors)
    mx.random.seed(6)
    answers = mlx_lm.stream_generate(
        model.mlx, tokenizer(), PROMPT, 40, sampler=make_sampler(1.0), logits_processors=[same]
    )
    for number, answer in enumerate(answers):
        assert int(output.sequences[0, len(PROMPT) + number]) == answer.token
        assert output.scores[number][0].tolist() == answer.logprobs.tolist()


def test_log_probabilities_of_an_engine() -> None:
    model = build_mlx("llama")
    expected = of_mlx(model, 1, {"temp": 0.5}, {})
    with Engine(model, config=DRAFTS) as engine:
        handle = engine.submit(PROMPT, seed=1, logprobs=2, **arguments({"temperature": 0.5}))
        events = list(handle.events())
    assert [event.token for event in events] == expected
    assert all(event.logprob <= event.top[0][1] and len(event.top) == 2 for event in events)


def test_penalty_of_presence_as_a_server_makes_it() -> None:
    """The server penalises tokens of the answer, mlx-lm the last tokens of the text."""
    from lookahead.server.plan import OccurrencePenalty

    model = build_mlx("llama")
    penalty = make_presence_penalty(0.7, 10**6)
    mx.random.seed(9)
    answers = mlx_lm.stream_generate(
        model.mlx, tokenizer(), PROMPT, 40, sampler=make_sampler(0.9),
        logits_processors=[lambda tokens, logits: penalty(tokens[len(PROMPT) :], logits)],
    )  # fmt: skip
    expected = [answer.token for answer in answers]
    with Engine(model, config=DRAFTS) as engine:
        options = arguments({"temperature": 0.9, "logits_processor": [OccurrencePenalty(0.7, 0.0, len(PROMPT))]})
        assert engine.submit(PROMPT, seed=9, **options).result()[0, len(PROMPT) :].tolist() == expected
