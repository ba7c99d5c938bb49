"""Models with running states: texts equal `model.generate`, or the call is refused."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import lookahead
from lookahead import LookaheadConfig, LookaheadError, UnsupportedArgumentError
from lookahead.parallel import ParallelGroup
from lookahead.parallel.exchange import Exchange
from lookahead.serving.output import LookaheadOutput
from quick import diagonal, quickly
from tiny.families import build
from tiny.variant import Variant

FAMILIES = ["qwen3_next", "granitemoehybrid", "mamba2", "lfm3", "deepseek_v4", "minimax"]
PRESETS = [
    LookaheadConfig(),
    LookaheadConfig(step_budget=8),
    LookaheadConfig(preset="context_matches"),
    LookaheadConfig(preset="token_recycling"),
    LookaheadConfig(preset="suffix_decoding"),
    LookaheadConfig(preset="racer"),
    LookaheadConfig(preset="jacobi", block_size=5),
    LookaheadConfig(preset="autoregressive"),
]


def tiny(family: str = "qwen3_next") -> PreTrainedModel:
    return build(family, Variant(), "sdpa")


def prompt(tokens: int = 14, seed: int = 0) -> torch.Tensor:
    """Return a text that is repeated once."""
    ids = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, ids], dim=1)


def decode(model: PreTrainedModel, ids: torch.Tensor, config: LookaheadConfig, **options: Any) -> LookaheadOutput:
    output = lookahead.generate(model, ids, lookahead_config=config, return_dict_in_generate=True, **options)
    assert isinstance(output, LookaheadOutput)
    return output


def plain(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(ids, return_dict_in_generate=True, **options)


# One family with all presets and every second family with one: the other pairs are for `make test-exact`.
QUICK = [*((FAMILIES[0], config) for config in PRESETS), *((family, PRESETS[0]) for family in FAMILIES[::2])]
PAIRS = [
    pytest.param(family, config, marks=() if (family, config) in QUICK else pytest.mark.exact)
    for family in FAMILIES
    for config in PRESETS
]


@pytest.mark.parametrize(("family", "config"), PAIRS, ids=lambda one: getattr(one, "preset", one))
def test_texts_equal_generate(family: str, config: LookaheadConfig) -> None:
    model = tiny(family)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        torch.manual_seed(3)
        output = decode(model, prompt(), config, max_new_tokens=40, **options)
        assert torch.equal(output.sequences, text_of_generate(family, options["do_sample"]))


@cache
def text_of_generate(family: str, sampled: bool) -> torch.Tensor:
    """Return the text that all configurations have to give."""
    model, options = tiny(family), {"temperature": 0.8} if sampled else {}
    torch.manual_seed(3)
    text: torch.Tensor = plain(model, prompt(), max_new_tokens=40, do_sample=sampled, **options).sequences
    return text


def test_drafts_are_accepted_and_states_counted() -> None:
    output = decode(tiny(), prompt(), LookaheadConfig(step_budget=8), max_new_tokens=80, do_sample=False)
    assert output.statistics is not None
    assert output.statistics.step_compression > 1.05
    # One layer of linear attention: the convolution's state and the heads' state, in float32.
    drafted = sum(nodes > 1 for nodes in output.statistics.nodes_per_step)
    layer = next(layer for layer in output.past_key_values.layers if hasattr(layer, "recurrent_states"))
    size = 4 * (layer.conv_states[0].numel() + layer.recurrent_states[0].numel())
    assert 0 < output.statistics.state_bytes <= drafted * size
    assert output.statistics.state_bytes % size == 0
    assert output.statistics.to_dict()["state_bytes"] == output.statistics.state_bytes


@pytest.mark.parametrize(
    "family", quickly(["qwen3_next", "granitemoehybrid", "lfm3", "deepseek_v4"], ["granitemoehybrid", "deepseek_v4"])
)
def test_caches_can_be_returned_and_continued(family: str) -> None:
    model = tiny(family)
    config = LookaheadConfig(step_budget=6)
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False}
    more = torch.tensor([[7, 8, 9]])
    expected = plain(model, prompt(), **options)
    whole = plain(model, torch.cat([expected.sequences, more], dim=1), **options).sequences
    ours = decode(model, prompt(), config, **options)
    text = torch.cat([ours.sequences, more], dim=1)
    # From us to transformers, from transformers to us, and a caller's cache that we fill.
    assert torch.equal(plain(model, text, past_key_values=ours.past_key_values, **options).sequences, whole)
    back = decode(model, text, config, past_key_values=expected.past_key_values, **options)
    assert torch.equal(back.sequences, whole)
    cache = DynamicCache(config=model.config)
    decode(model, prompt(), config, past_key_values=cache, **options)
    assert torch.equal(decode(model, text, config, past_key_values=cache, **options).sequences, whole)


def test_a_text_that_ends_inside_an_accepted_run() -> None:
    model = tiny()
    free = plain(model, prompt(), max_new_tokens=50, do_sample=False).sequences[0, 28:]
    ended = set()
    for place in range(5, 45, 8):
        end = int(free[place])
        options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        expected = plain(model, prompt(), **options)
        output = decode(model, prompt(), LookaheadConfig(step_budget=8), **options)
        assert torch.equal(output.sequences, expected.sequences)
        ended.add(output.sequences.shape[1])
        following = torch.cat([output.sequences, torch.tensor([[5]])], dim=1)
        plain_on = plain(model, following, max_new_tokens=5, past_key_values=output.past_key_values)
        assert torch.equal(plain_on.sequences, plain(model, following, max_new_tokens=5).sequences)
    assert len(ended) > 2


class _Fails(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 45:
            raise ArithmeticError("enough")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model = tiny()
    first = plain(model, prompt(), max_new_tokens=10, do_sample=False)
    text, cache = torch.cat([first.sequences, torch.tensor([[5]])], dim=1), first.past_key_values
    with pytest.raises(ArithmeticError):
        decode(
            *(model, text, LookaheadConfig(step_budget=8)),
            past_key_values=cache,
            max_new_tokens=30,
            stopping_criteria=StoppingCriteriaList([_Fails()]),
        )
    expected = plain(model, text, max_new_tokens=10, do_sample=False).sequences
    assert torch.equal(plain(model, text, past_key_values=cache, max_new_tokens=10).sequences, expected)


@pytest.mark.parametrize(
    ("family", "sample", "memory"), diagonal(["qwen3_next", "mamba2"], [False, True], ["request", "process"])
)
def test_rows_of_one_call(family: str, sample: bool, memory: Any) -> None:
    """Rows accept different numbers of tokens, and end in different steps."""
    model, ids = tiny(family), torch.cat([prompt(seed=seed) for seed in range(3)])
    texts = [model.generate(row[None], max_new_tokens=24, do_sample=False)[0] for row in ids]
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": int(texts[0][-8]), "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(ids, do_sample=sample, **options)
    torch.manual_seed(0)
    output = decode(model, ids, LookaheadConfig(step_budget=8, memory=memory), do_sample=sample, **options)
    assert torch.equal(output.sequences, expected)
    assert output.past_key_values is None


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({}, {"attention_mask": torch.tensor([[0] * 3 + [1] * 25])}, "hides tokens"),
        ({}, {"past_key_values": DynamicCache()}, "(cache|past_key_values)=DynamicCache"),
        ({"preset": "paper"}, {}, "preset='paper'"),
        ({"pack_weights": True}, {}, "pack_weights=True"),
        ({"invariant": True}, {}, "invariant=True"),
        ({}, {"use_cache": False}, "use_cache=False"),
    ],
)
def test_unsupported_arguments_are_refused(config: dict[str, Any], options: dict[str, Any], words: str) -> None:
    options = {"input_ids": prompt()} | options
    with pytest.raises(UnsupportedArgumentError, match=words):
        lookahead.generate(tiny(), lookahead_config=LookaheadConfig(**config), max_new_tokens=4, **options)


def test_offloaded_caches_are_refused() -> None:
    offloaded = DynamicCache(config=tiny().config, offloading=True)
    with pytest.raises(UnsupportedArgumentError, match="(cache|past_key_values)=DynamicCache"):
        lookahead.generate(tiny(), prompt(), past_key_values=offloaded, max_new_tokens=4)


def test_static_engines_run_chains_the_dynamic_way() -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    output = decode(tiny(), prompt(), LookaheadConfig(engine="static"), **options)
    assert torch.equal(output.sequences, plain(tiny(), prompt(), **options).sequences)


@pytest.mark.parametrize("family", ["nemotron_h", "bart"])
def test_texts_beyond_the_context(family: str) -> None:
    """Nemotron-H has no positions and continues; BART's decoder ends with its table."""
    model = build(family, Variant(context=40), "sdpa")
    expected = model.generate(prompt(), max_new_tokens=12 if family == "bart" else 40, do_sample=False)
    output = lookahead.generate(model, prompt(), max_new_tokens=40, do_sample=False)
    assert torch.equal(output[:, : expected.shape[1]], expected)
    assert output.shape[1] == (41 if family == "bart" else expected.shape[1])


def test_prompts_longer_than_any_step() -> None:
    model = tiny("mamba2")
    expected = model.generate(prompt(90), max_new_tokens=20, do_sample=False)
    assert torch.equal(lookahead.generate(model, prompt(90), max_new_tokens=20, do_sample=False), expected)


def test_attached_models_and_chunked_prompts() -> None:
    model = tiny()
    expected = model.generate(prompt(), max_new_tokens=20, do_sample=False)
    lookahead.attach(model)
    chunked = model.generate(prompt(), max_new_tokens=20, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(chunked, expected)


def test_prompts_in_parts_stay_visible_to_layers_that_keep_them() -> None:
    """Each row of a batch, and each text of an Engine, has its own prompt."""
    model, options = tiny("unlimited_ocr/multimodal"), {"max_new_tokens": 20, "do_sample": False}
    texts = [prompt(seed=seed) for seed in range(2)]
    expected = [model.generate(text, **options) for text in texts]
    for size in (1, 5, 27):
        rows = lookahead.generate(model, torch.cat(texts), prefill_chunk_size=size, **options)
        assert torch.equal(rows, torch.cat(expected))
    engine = lookahead.Engine(model, prompt_tokens=10, max_rows=1)
    handles = [engine.submit(texts[0], **options), engine.submit(texts[1], priority=1, **options)]
    engine.run()
    assert [handle.result().tolist() for handle in handles] == [text.tolist() for text in expected]


def test_ranks_are_refused() -> None:
    """Ranks split trees; the refusal comes before anything is sent."""
    monitor = SimpleNamespace(rank=0)
    group = ParallelGroup(Exchange(None, monitor, [0, 1], 1.0))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedArgumentError, match="parallel is not supported for Mamba2ForCausalLM"):
        lookahead.generate(tiny("mamba2"), prompt(), parallel=group, max_new_tokens=4)


def test_trees_are_refused_where_they_are_needed() -> None:
    from lookahead.backends.transformers.engine_model import engine_model

    with pytest.raises(LookaheadError, match="running state"):
        engine_model(tiny())
