"""Requests that come and go, each against transformers' own `generate` on its prompt alone."""

import asyncio
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

import lookahead
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, UnsupportedArgumentError
from model_zoo import VOCAB_SIZE, build

NODES = LookaheadConfig(step_budget=24)
PROMPT = [3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]


@dataclass
class Wanted:
    """A request, and when it comes."""

    step: int
    prompt: list[int]
    seed: int
    priority: int
    cancelled: bool
    options: dict[str, Any] = field(default_factory=dict)


def draw(random: Random, eos: int) -> Wanted:
    prompt = [random.randrange(1, VOCAB_SIZE) for _ in range(random.randrange(1, 10))] * random.choice([1, 2, 4])
    options: dict[str, Any] = {"max_new_tokens": random.randrange(1, 16), "do_sample": False}
    if random.random() < 0.5:
        options |= {"do_sample": True, "temperature": random.choice([0.7, 1.0]), "top_k": random.choice([0, 5])}
    if random.random() < 0.3:
        options["repetition_penalty"] = 1.3
    if random.random() < 0.3:
        options |= {"eos_token_id": [eos, eos + 1, eos + 2, eos + 3], "pad_token_id": 0}
    if random.random() < 0.2:
        options["no_repeat_ngram_size"] = 2
    return Wanted(
        random.randrange(10), prompt, random.randrange(1000), random.choice([0, 0, 1]), random.random() < 0.15, options
    )


def alone(model: Any, wanted: Wanted) -> list[int]:
    torch.manual_seed(wanted.seed)
    return model.generate(torch.tensor([wanted.prompt]), **wanted.options)[0].tolist()


@pytest.mark.parametrize("schedule", range(50))
def test_random_schedules(schedule: int) -> None:
    random = Random(schedule)
    model = build(["llama", "mistral_sliding", "gpt2"][schedule % 3])
    wanted = [draw(random, random.randrange(VOCAB_SIZE - 4)) for _ in range(random.randrange(2, 7))]
    memory = random.choice([None, 80, 100])
    engine = Engine(
        model,
        LookaheadConfig(step_budget=random.choice([1, 12, 24])),
        max_rows=random.choice([2, 4, 8]),
        kv_tokens=memory,
        prompt_tokens=random.choice([3, 8, 512]),
    )
    handles: dict[int, lookahead.RequestHandle] = {}
    for step in range(400):
        for number, request in enumerate(wanted):
            if request.step == step:
                handles[number] = engine.submit(
                    request.prompt, seed=request.seed, priority=request.priority, **request.options
                )
            elif request.cancelled and request.step + 3 == step:
                handles[number].cancel()
        if memory is not None:
            assert sum(request.row.length for request in engine._scheduler.running) <= memory
        if not engine.step() and step > 10:
            break
    assert len(handles) == len(wanted)
    for number, request in enumerate(wanted):
        handle, expected = handles[number], alone(model, request)
        assert handle.done
        if handle.cancelled:
            with pytest.raises(CancelledError):
                handle.result()
            assert handle.tokens == expected[len(request.prompt) :][: len(handle.tokens)]
        else:
            assert handle.result()[0].tolist() == expected, (number, request)
            assert handle.tokens == expected[len(request.prompt) :]
            assert handle.statistics.tokens == len(handle.tokens)


def test_rows_that_outgrow_the_memory_wait_and_go_on() -> None:
    model = build("llama")
    engine = Engine(model, LookaheadConfig(step_budget=4), kv_tokens=70)
    wanted = [Wanted(0, PROMPT, seed, 0, False, {"max_new_tokens": 40, "do_sample": True}) for seed in range(4)]
    handles = [engine.submit(each.prompt, seed=each.seed, **each.options) for each in wanted]
    engine.run()
    assert engine.statistics.preempted > 0
    assert [handle.result()[0].tolist() for handle in handles] == [alone(model, each) for each in wanted]


def test_a_long_prompt_does_not_hold_up_others() -> None:
    engine = Engine(build("llama"), LookaheadConfig(step_budget=4), prompt_tokens=8)
    short = engine.submit(PROMPT[:4], max_new_tokens=20, do_sample=False)
    engine.step()
    long = engine.submit(PROMPT * 8, max_new_tokens=2, do_sample=False)
    before = len(short.tokens)
    for count in range(1, 4):
        engine.step()
        assert len(short.tokens) >= before + count
    assert not long.tokens
    engine.run()
    assert long.done


def test_a_waiting_request_is_not_overtaken_for_ever() -> None:
    engine = Engine(build("llama"), LookaheadConfig(step_budget=1), max_rows=1)
    first = engine.submit(PROMPT, max_new_tokens=2, do_sample=False)
    late = [engine.submit(PROMPT, max_new_tokens=2, do_sample=False) for _ in range(3)]
    urgent = engine.submit(PROMPT, priority=1, max_new_tokens=2, do_sample=False)
    order = []
    while engine.step():
        order += [each for each in (first, *late, urgent) if each.done and each not in order]
    assert order[:1] == [urgent]
    assert order[1:] == [first, *late][: len(order) - 1]


def test_drafts_are_shared_by_the_rows_of_a_step() -> None:
    model = build("llama")
    engine = Engine(model, NODES)
    sent: list[int] = []
    hook = engine._runner.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: sent.append(inputs[0].shape[1])
    )
    handles = [engine.submit(PROMPT, max_new_tokens=20, do_sample=False) for _ in range(6)]
    engine.step()
    sent.clear()
    engine.run()
    hook.remove()
    assert max(sent) <= 24
    assert max(len(each.tokens) / each.statistics.steps for each in handles) > 1.1


def test_readers_of_a_thread_and_of_asyncio() -> None:
    model = build("llama")
    wanted = [
        Wanted(0, PROMPT[:length], length, 0, False, {"max_new_tokens": 12, "do_sample": True}) for length in (4, 7)
    ]
    expected = [alone(model, each)[len(each.prompt) :] for each in wanted]

    async def read(engine: Engine) -> list[list[int]]:
        async def tokens(each: Wanted) -> list[int]:
            return [token async for token in engine.submit(each.prompt, seed=each.seed, **each.options)]

        return await asyncio.gather(*map(tokens, wanted))

    with Engine(model, NODES) as engine:
        assert asyncio.run(read(engine)) == expected
        assert [list(engine.submit(each.prompt, seed=each.seed, **each.options)) for each in wanted] == expected
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.submit(PROMPT)
    # without a thread, whoever reads runs the steps
    engine = Engine(model, NODES)
    assert [list(engine.submit(each.prompt, seed=each.seed, **each.options)) for each in wanted] == expected
    assert asyncio.run(read(engine)) == expected


def test_closing_finishes_or_gives_up() -> None:
    model = build("llama")
    engine = Engine(model, NODES)
    engine.start()
    handles = [engine.submit(PROMPT, max_new_tokens=8, do_sample=False) for _ in range(3)]
    engine.close()
    assert [len(handle.tokens) for handle in handles] == [8, 8, 8]
    engine = Engine(model, NODES)
    handle = engine.submit(PROMPT, max_new_tokens=400, do_sample=False)
    engine.close(cancel=True)
    with pytest.raises(CancelledError):
        handle.result()


def test_what_a_processor_raises_ends_its_own_request() -> None:
    model = build("llama")
    calls = []

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise ArithmeticError("the fifth token")
        return scores

    engine = Engine(model, NODES)
    other = engine.submit(PROMPT, max_new_tokens=16, do_sample=False)
    broken = engine.submit(PROMPT, max_new_tokens=16, do_sample=False, logits_processor=[fails])
    engine.run()
    with pytest.raises(ArithmeticError, match="fifth"):
        broken.result()
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    assert torch.equal(other.result(), expected)


def test_stop_strings_scores_and_streamers(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids  # range(len(self.num_layers)):
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "stop_strings": ["rs)"],
        "tokenizer": tokenizer,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = model.generate(ids, **options)
    assert expected.sequences.shape[1] < ids.shape[1] + 24
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = Engine(model, NODES).submit(ids, streamer=streamer, **options).result()
    assert torch.equal(output.sequences, expected.sequences)
    for mine, theirs in zip(output.scores, expected.scores, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)
    assert "".join(streamer) == tokenizer.decode(expected.sequences[0, ids.shape[1] :])


def test_what_cannot_be_served_is_refused() -> None:
    engine = Engine(build("llama"), NODES, kv_tokens=60)
    with pytest.raises(InvalidArgumentError, match="kv_tokens=60"):
        engine.submit(PROMPT, max_new_tokens=100)
    with pytest.raises(UnsupportedArgumentError, match="2 rows"):
        engine.submit(torch.tensor([PROMPT, PROMPT]), max_new_tokens=4)
    with pytest.raises(UnsupportedArgumentError, match="num_beams"):
        engine.submit(PROMPT, max_new_tokens=4, num_beams=2)
    with pytest.raises(InvalidArgumentError, match="max_rows=0"):
        Engine(build("llama"), max_rows=0)
    with pytest.raises(UnsupportedArgumentError, match="invariant"):
        Engine(build("llama"), LookaheadConfig(invariant=True))
    scaled = Engine(build("phi3_long_rope"), NODES)
    with pytest.raises(UnsupportedArgumentError, match="positions"):
        scaled.submit(PROMPT, max_new_tokens=100)
    assert engine.step() == 0
