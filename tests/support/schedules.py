"""Random schedules of an `Engine`: requests come, are cancelled and preempted, and each is held against `generate`."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from fuzz.families import build as build_family
from fuzz.variant import Variant
from lookahead import Engine, LookaheadConfig, RequestHandle
from model_zoo import VOCAB_SIZE, build


class Favour(LogitsProcessor):  # type: ignore[misc]
    """Makes a token likelier that depends on the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, (7 * int(input_ids.shape[1]) + int(input_ids[0, -1])) % scores.shape[1]] += 2.0
        return scores


@cache
def words() -> PreTrainedTokenizerFast:
    """A tokenizer for the models of the zoo."""
    vocabulary = {f"w{token}": token for token in range(VOCAB_SIZE)}
    vocabulary["abcdef"] = VOCAB_SIZE  # transformers' stop strings need this word
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclass
class Wanted:
    """A request, and when it comes."""

    step: int
    prompt: list[int]
    seed: int
    priority: int = 0
    cancelled: int | None = None  # steps after it came
    options: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    favours: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return self.options | ({"logits_processor": [Favour()]} if self.favours else {})

    def submit(self, engine: Engine) -> RequestHandle:
        return engine.submit(self.prompt, seed=self.seed, priority=self.priority, **self.extras, **self.arguments)

    def alone(self, model: PreTrainedModel) -> list[int]:
        """The text that `generate` gives."""
        torch.manual_seed(self.seed)
        return model.generate(torch.tensor([self.prompt]), **self.arguments)[0].tolist()


def draw(random: Random, shared: list[int]) -> Wanted:
    """A request; half of them begin with `shared`."""
    tail = [random.randrange(1, VOCAB_SIZE) for _ in range(random.randrange(1, 10))] * random.choice([1, 2, 4])
    prompt = tail if random.random() < 0.5 else shared + tail
    wanted = Wanted(random.randrange(10), prompt, random.randrange(1000), random.choice([0, 0, 1]))
    longest = 16 if len(prompt) > 20 else 48  # short prompts are let in together, and outgrow the memory
    wanted.options = {"max_new_tokens": random.randrange(1, longest), "do_sample": False}
    if random.random() < 0.5:
        wanted.options |= {"do_sample": True, "temperature": random.choice([0.7, 1.0]), "top_k": random.choice([0, 5])}
    if random.random() < 0.3:
        wanted.options["repetition_penalty"] = 1.3
    if random.random() < 0.3:
        eos = random.randrange(VOCAB_SIZE - 4)
        wanted.options |= {"eos_token_id": [eos, eos + 1, eos + 2, eos + 3], "pad_token_id": 0}
    if random.random() < 0.2:
        wanted.options["no_repeat_ngram_size"] = 2
    if random.random() < 0.2:
        wanted.options |= {"stop_strings": [f"w{random.randrange(10)}"], "tokenizer": words()}
    wanted.favours = random.random() < 0.3
    if random.random() < 0.2:
        wanted.cancelled = random.randrange(1, 6)
    if random.random() < 0.2:
        wanted.extras["logprobs"] = random.randrange(3)
    if random.random() < 0.2:
        wanted.extras["prediction"] = [random.randrange(VOCAB_SIZE) for _ in range(8)]
    if random.random() < 0.4:
        wanted.extras["group"] = "one"
    return wanted


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values of a token."""
    return Engine(model)._memory.token_bytes


HYBRIDS = ("qwen3_next", "granitemoehybrid", "mamba2", "lfm2", "minimax", "falcon_h1")
"""Families with running states, whose rows are chains."""


def run_schedule(seed: int, hybrids: bool = False) -> dict[str, int]:
    """Run the schedule of a seed, and compare every text; returns what happened, counted."""
    random = Random(seed)
    if hybrids:
        model = build_family(HYBRIDS[seed % len(HYBRIDS)], Variant(), "sdpa")
    else:
        model = build(["llama", "mistral_sliding", "gpt2"][seed % 3])
    shared = [random.randrange(1, VOCAB_SIZE) for _ in range(random.choice([0, 18, 30]))]
    wanted = [draw(random, shared) for _ in range(random.randrange(2, 7))]
    for one in wanted:
        if "prediction" in one.extras and random.random() < 0.7:  # one that comes true, but for a token
            text = one.alone(model)[len(one.prompt) :]
            text[random.randrange(len(text))] = 1
            one.extras["prediction"] = text
    room = random.choice([None, 110, 140])
    size = token_bytes(model)
    engine = Engine(
        model,
        LookaheadConfig(
            step_budget=random.choice([None, 1, 12, 24]) if room is None else random.choice([1, 12, 24]),
            memory=random.choice(["request", "process"]),
        ),
        max_rows=random.choice([2, 4, 8]),
        kv_bytes=None if room is None else room * size,
        prompt_tokens=random.choice([3, 8, 512]),
        prefix_cache=random.random() < 0.6,
    )
    handles: dict[int, RequestHandle] = {}
    for step in range(600):
        for number, request in enumerate(wanted):
            if request.step == step:
                handles[number] = request.submit(engine)
            elif request.cancelled is not None and request.step + request.cancelled == step:
                handles[number].cancel()
        left = engine.step()
        if room is not None:
            assert engine.load.kv_bytes + engine.load.prefix_bytes <= room * size
        if not left and step > 10:
            break
    assert len(handles) == len(wanted)
    for number, request in enumerate(wanted):
        _compare(model, request, handles[number])
    counts = engine.statistics
    cancelled = sum(handle.cancelled for handle in handles.values())
    return {"preempted": counts.preempted, "reused": counts.reused_tokens, "cancelled": cancelled}


def _compare(model: PreTrainedModel, request: Wanted, handle: RequestHandle) -> None:
    expected = request.alone(model)
    assert handle.done
    if handle.cancelled:
        with pytest.raises(CancelledError):
            handle.result()
        assert handle.finish_reason == "cancelled"
        assert handle.tokens == expected[len(request.prompt) :][: len(handle.tokens)]
        return
    assert handle.result()[0].tolist() == expected, request
    assert handle.tokens == expected[len(request.prompt) :]
    assert handle.statistics.tokens == len(handle.tokens)
    full = len(handle.tokens) == request.options["max_new_tokens"]
    assert handle.finish_reason in (("length", "stop") if full else ("stop",))
