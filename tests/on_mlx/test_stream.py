"""`stream_generate` with lookahead decoding against `mlx_lm.stream_generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed; `make test-mlx` installs it, and runs these tests")

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from lookahead import InvalidArgumentError, LookaheadConfig, UnsupportedArgumentError
from lookahead.backends.mlx.model import MLXModel
from lookahead.core.statistics import Statistics
from lookahead.integrations.mlx import stream_generate
from mlx_zoo import CHAINS, TREES, VOCABULARY, build_mlx, build_module, tokenizer

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = [(7 * place * place + 3) % VOCABULARY for place in range(23)] * 2
DRAFTS = LookaheadConfig(step_budget=12)


def stream(way: Any, model: Any, prompt: Any = PROMPT, words: Any = None, **options: Any) -> list[tuple[Any, ...]]:
    """Responses of a call from a seed, and the random state after it."""
    mx.random.seed(5)
    options.setdefault("max_tokens", 40)
    found = [
        (response.token, response.text, response.finish_reason, response.generation_tokens, response.prompt_tokens)
        for response in way(model, words or tokenizer(), prompt, **options)
    ]
    return [*found, tuple(mx.random.state[0].tolist())]


def check(model: Any, statistics: Statistics | None = None, **options: Any) -> None:
    expected = stream(mlx_lm.stream_generate, model.mlx, **options)
    assert stream(stream_generate, model, lookahead_config=DRAFTS, statistics=statistics, **options) == expected


@pytest.mark.parametrize("architecture", [*TREES, *CHAINS])
def test_texts_equal_mlx_lm(architecture: str) -> None:
    model = build_mlx(architecture)
    statistics = Statistics()
    check(model, statistics)
    assert statistics.step_compression > 1
    check(model, sampler=make_sampler(0.7, top_p=0.9))
    is_chain = architecture in CHAINS and architecture != "mistral3"  # mlx-lm gives this one plain caches
    assert (model.way == "chains") == is_chain


@pytest.mark.parametrize(
    "sampling",
    [
        {"temp": 0.8},
        {"temp": 1.0, "min_p": 0.05},
        {"temp": 1.2, "top_k": 12},
        {"temp": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"temp": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_sampled_texts_equal_under_the_same_seed(sampling: dict[str, Any], dtype: Any) -> None:
    check(build_mlx("qwen3", dtype=dtype), sampler=make_sampler(**sampling))


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.4}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"logit_bias": {4: 5.0}}],
    ids=str,
)
def test_logits_processors_see_the_text_of_plain_decoding(penalties: dict[str, Any]) -> None:
    model = build_mlx("llama")
    check(model, logits_processors=make_logits_processors(**penalties))
    check(model, logits_processors=make_logits_processors(**penalties), sampler=make_sampler(0.8))


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "gpt_oss"])
def test_end_tokens_and_parts_of_a_prompt(architecture: str) -> None:
    model = build_mlx(architecture)
    plain = stream(mlx_lm.stream_generate, model.mlx)
    end = plain[20][0]
    words = tokenizer((end,))
    for options in ({"words": words}, {"prefill_step_size": 9}, {"max_tokens": 1}, {"prompt": "w3 w9 w4"}):
        check(model, **options)


@pytest.mark.parametrize("size", [16, 56, 200])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])  # Llama of mlx-lm ignores the size
def test_texts_longer_than_max_kv_size(architecture: str, size: int) -> None:
    check(build_mlx(architecture), max_kv_size=size)
    check(build_mlx(architecture), max_kv_size=size, prefill_step_size=7, prompt=PROMPT * 3)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "gemma3_text", "falcon_h1"])
def test_prompt_caches_are_continued_and_returned(architecture: str, tmp_path: Path) -> None:
    model = build_mlx(architecture)
    turns = []
    for way, module in ((mlx_lm.stream_generate, model.mlx), (stream_generate, model)):
        cache = make_prompt_cache(model.mlx)
        first = stream(way, module, prompt_cache=cache)
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        turns.append([first, stream(way, module, [5, 6, 7], prompt_cache=loaded, sampler=make_sampler(0.6))])
    assert turns[0] == turns[1]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_a_stream_that_is_left_early_leaves_the_yielded_tokens(architecture: str) -> None:
    model = build_mlx(architecture)
    turns = []
    for way, module in ((mlx_lm.stream_generate, model.mlx), (stream_generate, model)):
        for count in (1, 6, 11):
            cache = make_prompt_cache(model.mlx)
            mx.random.seed(2)
            responses = way(module, tokenizer(), PROMPT, prompt_cache=cache, sampler=make_sampler(0.2))
            tokens = [next(responses).token for _ in range(count)]
            responses.close()
            state = tuple(mx.random.state[0].tolist())
            turns.append((tokens, state, stream(way, module, [8, 9], prompt_cache=cache)))
    assert turns[:3] == turns[3:]


def test_a_second_turn_beyond_max_kv_size_sends_no_drafts() -> None:
    """The memory of the first turn has drafts for the first step of the second one."""
    model = build_mlx("qwen3")
    turns = []
    for way, module, options in (
        (mlx_lm.stream_generate, model.mlx, {}),
        (stream_generate, model, {"lookahead_config": DRAFTS}),
        (stream_generate, model, {"lookahead_config": DRAFTS}),
    ):
        cache = make_prompt_cache(model.mlx, 24)
        texts = [stream(way, module, prompt, prompt_cache=cache, **options) for prompt in (PROMPT, [3], [5])]
        turns.append(texts)
    assert turns[0] == turns[1] == turns[2]


@pytest.mark.parametrize("architecture", ["llama", "falcon_h1"])
@pytest.mark.parametrize("calls", [1, 5, 6, 9])
def test_an_interrupted_step_leaves_the_yielded_tokens(architecture: str, calls: int) -> None:
    model = build_mlx(architecture)
    left = iter(range(calls))

    def interrupt(tokens: mx.array, logits: mx.array) -> mx.array:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return logits

    cache = make_prompt_cache(model.mlx)
    tokens: list[int] = []
    options: dict[str, Any] = {"prompt_cache": cache, "logits_processors": [interrupt], "lookahead_config": DRAFTS}
    responses = stream_generate(model, tokenizer(), PROMPT, **options)
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(response.token for response in responses)
    expected = stream(mlx_lm.stream_generate, model.mlx, [*PROMPT, *tokens, 8, 9])
    assert [row[:4] for row in stream(stream_generate, model, [8, 9], prompt_cache=cache)] == [
        row[:4] for row in expected
    ]


def test_threads_have_their_own_random_numbers() -> None:
    model = build_mlx("llama")
    options: dict[str, Any] = {"sampler": make_sampler(0.9)}
    expected = stream(mlx_lm.stream_generate, model.mlx, **options)
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(stream, stream_generate, model, lookahead_config=DRAFTS, **options) for _ in range(3)]
    assert [text.result() for text in found] == [expected] * 3


def test_tied_weights_and_a_vocabulary_larger_than_the_tokenizer() -> None:
    module = build_module("qwen3", tie_word_embeddings=True)
    words = tokenizer(words=50)
    model = MLXModel(module, words)
    check(model, words=words)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": 3},
        {"logits_processors": lambda tokens, logits: logits},
        {"logits_processors": [3]},
        {"prompt": None},
        {"prompt": [[1, 2]]},
        {"prompt": [1.5]},
        {"max_kv_size": 0},
        {"prompt_cache": []},
        {"prompt_cache": 7},
        {"prompt_progress_callback": 3},
    ],
    ids=str,
)
def test_invalid_values_are_refused(options: dict[str, Any]) -> None:
    model = build_mlx("llama")
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        list(stream_generate(model, tokenizer(), options.pop("prompt", PROMPT), **options))


def test_what_is_not_supported_is_named() -> None:
    model = build_mlx("llama")
    quantised = [QuantizedKVCache() for _ in model.mlx.layers]
    for options, error, words in (
        ({"kv_bits": 8}, UnsupportedArgumentError, "kv_bits"),
        ({"draft_model": model.mlx}, UnsupportedArgumentError, "draft_model"),
        ({"prompt_cache": quantised}, UnsupportedArgumentError, "QuantizedKVCache"),
        ({"max_tokens": 0}, InvalidArgumentError, "max_tokens"),
        ({"prefill_step_size": 0}, InvalidArgumentError, "prefill_step_size"),
        ({"prompt": []}, InvalidArgumentError, "prompt"),
        ({"prompt": [3, VOCABULARY]}, InvalidArgumentError, "prompt"),
        ({"lookahead_config": LookaheadConfig(invariant=True)}, InvalidArgumentError, "invariant"),
    ):
        arguments = {"prompt": PROMPT, **options}
        with pytest.raises(error, match=words):
            list(stream_generate(model, tokenizer(), **arguments))
    with pytest.raises(InvalidArgumentError, match="model"):
        stream_generate(model.mlx, tokenizer(), PROMPT)
