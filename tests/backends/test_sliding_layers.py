"""Sliding layers drop tokens that no later token sees, and texts still equal `model.generate`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

import lookahead
import model_zoo
from lookahead import Engine, LookaheadConfig, UnsupportedModelError
from lookahead.backends.transformers import TRANSFORMERS
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.tree_cache import TreeCache
from quick import diagonal, quickly
from tiny.families import build
from tiny.variant import Variant

WINDOW = 24
CONFIG = LookaheadConfig(step_budget=12)
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}


def test_a_long_text_takes_as_much_memory_as_in_transformers() -> None:
    """32,768 tokens on the layers of Gemma 3: five sliding layers with a window of 512 per full layer."""
    layers, tokens, steps = 12, 32_768, 40
    config = Gemma3TextConfig(num_hidden_layers=layers, sliding_window=512)
    ours, plain = TreeCache(MaskBuilder(config).windows), DynamicCache(config=config)

    def send(nodes: int) -> torch.Tensor:
        return torch.zeros(1, 1, nodes, 4)

    for sent in (tokens, *[20] * steps):
        ours.drop()
        for layer in range(layers):
            ours.update(send(sent), send(sent), layer)
        accepted = sent if sent == tokens else 3
        ours.set_length(ours.length + accepted)
        for layer in range(layers):
            plain.update(send(accepted), send(accepted), layer)
    ours.drop()
    assert ours.get_seq_length() == plain.get_seq_length() == tokens + 3 * steps
    assert bytes_of(ours) <= 1.05 * bytes_of(plain)


def bytes_of(cache: Cache) -> int:
    states = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in states)


@pytest.mark.parametrize("family", quickly(["gemma3_text", "mistral"], ["gemma3_text"]))
@pytest.mark.parametrize("makers", quickly([(True, True), (True, False), (False, True)], [(True, True), (False, True)]))
@pytest.mark.parametrize("given", ["none", "windows", "all"])
def test_caches_across_the_end_of_the_window(family: str, makers: tuple[bool, bool], given: str) -> None:
    model = build(family, Variant(window=WINDOW), "sdpa")
    for length in (5, WINDOW + 1, 40):
        texts = []
        for turns in ((False, False), makers):
            ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(length))
            cache: Cache | None = {"none": None, "windows": DynamicCache(config=model.config)}.get(
                given, DynamicCache()
            )
            for ours in turns:
                if ours:
                    answer = lookahead.generate(model, ids, past_key_values=cache, lookahead_config=CONFIG, **OPTIONS)
                else:
                    answer = type(model).generate(model, ids, past_key_values=cache, **OPTIONS)
                cache = answer.past_key_values
                ids = torch.cat([answer.sequences, torch.tensor([[7, 8, 9]])], dim=1)
            texts.append(ids)
            if turns == (True, True) and given == "none":
                assert 0 < min(layer.keys.shape[2] for layer in cache.layers) < ids.shape[1] + 40
        assert torch.equal(*texts)


@pytest.mark.skipif(TRANSFORMERS < (5, 20), reason="transformers breaks past the first context")
def test_dropped_tokens_are_computed_anew() -> None:
    """Past the first context, Phi-3 reads its whole text again."""
    whole = model_zoo.build("phi3_long_rope")
    config = copy.deepcopy(whole.config)
    config.sliding_window = 8
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(whole.state_dict())
    ids = torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(lookahead.generate(model, ids, lookahead_config=CONFIG, **options), expected)


@pytest.mark.parametrize("given", ["empty", "filled"])
def test_caches_of_the_caller_across_chunks(given: str) -> None:
    """transformers stores one chunk's columns in chunked layers, even if later tokens do not see them."""
    model = model_zoo.build("llama4_chunked")
    options = {"max_new_tokens": 30, "do_sample": False}
    for length in (5, 9, 30):
        ids = torch.randint(3, 70, (1, length), generator=torch.Generator().manual_seed(length))
        cache = DynamicCache(config=model.config)
        if given == "filled":
            model.generate(ids[:, :-2], past_key_values=cache, max_new_tokens=1, do_sample=False)
        output = lookahead.generate(model, ids, past_key_values=cache, lookahead_config=CONFIG, **options)
        assert torch.equal(output, model.generate(ids, **options)), length


@pytest.mark.parametrize(
    ("name", "setting"),
    [("mistral_sliding", "sliding_window"), ("gemma3", "sliding_window"), ("llama4_chunked", "attention_chunk_size")],
)
def test_windows_of_one_token_are_refused(name: str, setting: str) -> None:
    """transformers keeps all tokens of such layers, and single tokens see them."""
    config = copy.deepcopy(model_zoo.build(name).config)
    setattr(config, setting, 1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for run in (lookahead.attach, Engine, partial(lookahead.generate, input_ids=torch.tensor([[5, 6, 7]]))):
        with pytest.raises(UnsupportedModelError, match="window of 1 token"):
            run(model)


@pytest.mark.parametrize(("name", "given"), diagonal(["gemma3", "mistral_sliding"], ["empty", "filled"]))
def test_invariant_passes_with_caches_of_the_caller(name: str, given: str) -> None:
    """Masks of invariant passes cover all columns, even those dropped by the caller's cache."""
    model = model_zoo.build(name)
    config = LookaheadConfig(step_budget=12, invariant=True)
    ids = torch.randint(3, 70, (1, 30), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    options = {"max_new_tokens": 20, "do_sample": False}
    if given == "filled":
        lookahead.generate(
            model, ids[:, :25], past_key_values=cache, lookahead_config=config, **{**options, "max_new_tokens": 1}
        )
        assert min(layer.keys.shape[2] for layer in cache.layers) < 24
    output = lookahead.generate(model, ids, past_key_values=cache, lookahead_config=config, **options)
    assert torch.equal(output, lookahead.generate(model, ids, lookahead_config=config, **options))


def test_a_text_shorter_than_the_window() -> None:
    model = build("mistral", Variant(window=WINDOW), "sdpa")
    ids = torch.tensor([[5, 6, 7]])
    options = {**OPTIONS, "max_new_tokens": 4}
    first = lookahead.generate(model, ids, lookahead_config=CONFIG, **options)
    cache = first.past_key_values
    assert cache.get_seq_length() == 6
    cache.crop(-1)
    assert cache.get_seq_length() == 5
    second = lookahead.generate(model, first.sequences, past_key_values=cache, lookahead_config=CONFIG, **options)
    assert torch.equal(second.sequences, model.generate(first.sequences, **options).sequences)


def test_returned_caches_only_hold_the_window() -> None:
    model = build("mistral", Variant(window=WINDOW), "sdpa")
    ids = torch.randint(3, 90, (2, 200), generator=torch.Generator().manual_seed(0))
    answer = lookahead.generate(model, ids, lookahead_config=CONFIG, **OPTIONS)
    assert torch.equal(answer.sequences, model.generate(ids, **OPTIONS).sequences)
    for layer in answer.past_key_values.layers:
        assert layer.keys.shape[2] == WINDOW - 1
        assert layer.keys.untyped_storage().nbytes() < 120 * layer.keys[:, :, 0].nbytes


class Fails(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if input_ids.shape[1] > 80:
            raise RuntimeError("a user's criterion failed")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model = build("gemma3_text", Variant(window=WINDOW), "sdpa")
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    first = lookahead.generate(model, ids, lookahead_config=CONFIG, **OPTIONS)
    cache, later = first.past_key_values, {**OPTIONS, "max_new_tokens": 50}
    stop = StoppingCriteriaList([Fails()])
    with pytest.raises(RuntimeError, match="criterion"):
        lookahead.generate(model, first.sequences, past_key_values=cache, stopping_criteria=stop, **later)
    assert cache.get_seq_length() == 59
    second = lookahead.generate(model, first.sequences, past_key_values=cache, **later)
    assert torch.equal(second.sequences, model.generate(first.sequences, **later).sequences)
