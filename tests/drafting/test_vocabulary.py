"""Drafts only hold tokens of the model's vocabulary, even with a memory of a larger one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MarianConfig, MarianMTModel, PreTrainedModel

import lookahead
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, LookaheadWarning, NGramPool
from lookahead.drafting import DraftMemory, TokenPaths
from model_zoo import VOCAB_SIZE, build

LEARNED = torch.tensor([[5, 60, 61, 62, 63, 5, 60, 61, 62, 63, 5, 60]])
LEFT = 30
"""Size of the reduced vocabulary."""
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 20, 5]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model() -> PreTrainedModel:
    """A new tiny random Llama for each test."""
    return copy.deepcopy(build("llama"))


def plain(model: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    text: torch.Tensor = type(model).generate(model, prompt, **{**OPTIONS, **options})
    return text


def resize(model: PreTrainedModel, tokens: int) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(tokens, mean_resizing=False)


def door(how: str, model: PreTrainedModel, folder: Path) -> Any:
    """Return an entry point for `model` with a memory that lasts between calls."""
    config = LookaheadConfig(memory=folder / "memory" if how == "file" else "process", step_budget=16)
    if how == "engine":
        engine = Engine(model, config)
        return lambda prompt, **options: engine.submit(prompt, **options).result()
    if how == "attach":
        lookahead.attach(model, config)
        return model.generate
    if how == "pool":
        pool = NGramPool(5, 7)
        config = LookaheadConfig(preset="paper", ngram_size=5, guess_set_size=7, pool_from_prompt=True)
        return lambda prompt, **options: lookahead.generate(
            model, prompt, lookahead_config=config, ngram_pool=pool, **options
        )
    return lambda prompt, **options: lookahead.generate(model, prompt, lookahead_config=config, **options)


@pytest.mark.parametrize("how", ["process", "file", "engine", "attach", "pool"])
def test_texts_are_equal_after_the_vocabulary_has_shrunk_and_grown(
    how: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    generate = door(how, model, tmp_path)
    generate(LEARNED, **OPTIONS)
    generate(torch.arange(1, VOCAB_SIZE - 1)[None], **OPTIONS)
    for tokens in (LEFT, VOCAB_SIZE + 20, LEFT - 5):
        resize(model, tokens)
        for _ in range(2):
            assert torch.equal(generate(PROMPT, **OPTIONS), plain(model, PROMPT))
    with pytest.raises(InvalidArgumentError, match="vocabulary has 25 entries"):
        generate(LEARNED, **OPTIONS)


def test_requests_that_wait_while_the_vocabulary_shrinks(model: PreTrainedModel) -> None:
    engine = Engine(model, LookaheadConfig(memory="process", step_budget=16), max_rows=1)
    engine.submit(LEARNED, **OPTIONS).result()
    engine.submit(LEARNED, **OPTIONS)
    waits, is_gone = engine.submit(PROMPT, **OPTIONS), engine.submit(LEARNED, **OPTIONS)
    engine.step()
    resize(model, LEFT)
    assert torch.equal(waits.result(), plain(model, PROMPT))
    with pytest.raises(InvalidArgumentError, match="token id 63, but the model's vocabulary has 30"):
        is_gone.result()


class Gone:
    """A source of a token outside of the reduced vocabulary."""

    name = "gone"

    def start(self, prompt: Any) -> None:
        """Ignore the text."""

    def propose(self) -> TokenPaths:
        return TokenPaths.chain([60, 61])

    def certain(self) -> list[int]:
        return [61]

    def observe(self, result: Any) -> None:
        """Learn nothing."""


def test_a_source_of_tokens_that_are_gone_costs_its_request_the_drafts(model: PreTrainedModel) -> None:
    resize(model, LEFT)
    engine = Engine(model, LookaheadConfig(step_budget=16))
    config = LookaheadConfig(step_budget=16, sources=(Gone,))
    handles = [engine.submit(PROMPT, lookahead_config=one, **OPTIONS) for one in (None, config)]
    with pytest.warns(LookaheadWarning, match="proposed tokens outside of 0 to 29"):
        engine.run()
    for handle in handles:
        assert torch.equal(handle.result(), plain(model, PROMPT))
    assert handles[0].statistics.steps < 40


@pytest.mark.parametrize("preset", ["auto", "paper", "jacobi", "token_recycling", "suffix_decoding", "racer"])
def test_a_head_that_names_more_tokens_than_the_model_reads(model: PreTrainedModel, preset: str) -> None:
    model.set_input_embeddings(torch.nn.Embedding(LEFT, model.config.hidden_size, _weight=model.lm_head.weight[:LEFT]))
    options = {**OPTIONS, "suppress_tokens": list(range(LEFT, VOCAB_SIZE))}
    config = LookaheadConfig(preset=preset, step_budget=None if preset in ("paper", "jacobi") else 16)
    text = lookahead.generate(model, PROMPT, lookahead_config=config, **options)
    assert torch.equal(text, plain(model, PROMPT, **options))


def test_an_encoder_that_reads_more_tokens_than_the_decoder() -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": 300, "decoder_vocab_size": 110}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "init_std": 0.5}
    model = MarianMTModel(MarianConfig(share_encoder_decoder_embeddings=False, **sizes, **special)).eval()
    source = torch.tensor([[number for token in range(3, 110) for number in (token, token + 110)]])
    options = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "temperature": 2.0, "num_beams": 1}
    for seed in range(4):
        torch.manual_seed(seed)
        expected = model.generate(source, **options)
        torch.manual_seed(seed)
        text = lookahead.generate(model, source, lookahead_config=LookaheadConfig(step_budget=16), **options)
        assert torch.equal(text, expected)


def test_a_memory_forgets_contexts_that_tokens_followed_which_are_gone() -> None:
    memory = DraftMemory(2, 64, 2)
    memory.entries.heads["tag"][0, :2] = 1, 2
    memory.entries.followers["token"][0, :2] = [[3, 9], [3, 4]]
    memory.clock = 1
    memory.fit(9)
    assert memory.entries.heads["tag"][0, :2].tolist() == [0, 2]
    memory.fit(20)
    memory.fit(4)
    assert not memory.entries.heads["tag"].any()


def test_a_memory_file_says_how_many_tokens_its_model_has(model: PreTrainedModel, tmp_path: Path) -> None:
    door("file", model, tmp_path)(PROMPT, **OPTIONS)
    assert int(np.load(tmp_path / "memory")["vocabulary"]) == VOCAB_SIZE
    other = copy.deepcopy(model)
    resize(other, LEFT)
    with pytest.raises(InvalidArgumentError, match=f"another model .*, {VOCAB_SIZE} tokens"):
        door("file", other, tmp_path)(PROMPT, **OPTIONS)
