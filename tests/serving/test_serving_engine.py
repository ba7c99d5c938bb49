"""Requests that join and leave, each against `model.generate` for its prompt."""

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

import lookahead
from compared.doors import token_bytes
from compared.report import check
from compared.tables import TABLES
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, RequestHandle, UnsupportedArgumentError
from lookahead.backends.machine import free_bytes, of_the_group
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.model_state import state_of
from lookahead.core.protocols import NoDrafter
from model_zoo import build, in_type

NODES = LookaheadConfig(step_budget=24)
PROMPT = [3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]


class RequestArguments(NamedTuple):
    """A request."""

    prompt: list[int]
    seed: int
    options: dict[str, Any]

    def submit(self, engine: Engine, **extras: Any) -> RequestHandle:
        return engine.submit(self.prompt, seed=self.seed, **self.options, **extras)

    def alone(self, model: PreTrainedModel) -> list[int]:
        """Return the text of `model.generate`."""
        torch.manual_seed(self.seed)
        text: list[int] = model.generate(torch.tensor([self.prompt]), **self.options)[0].tolist()
        return text


def check_schedules(table: str, numbers: Iterable[int]) -> Counter[str]:
    """Run the schedules with these numbers, check that they match, and return counts of events."""
    seen = Counter[str]()
    for number in numbers:
        case = TABLES[table].draw(number)
        assert case is not None
        seen.update(check(case, table).counts)
    return seen


@pytest.mark.parametrize("number", range(8))
def test_random_schedules(number: int) -> None:
    check_schedules("schedules", [number])


@pytest.mark.parametrize("number", range(3))
def test_random_schedules_of_hybrids(number: int) -> None:
    """Rows with running states, with a pass per row."""
    check_schedules("hybrid schedules", [number])


@pytest.mark.exact
def test_500_random_schedules_of_hybrids() -> None:
    seen = check_schedules("hybrid schedules", range(3, 503))
    assert seen["cancelled"] > 50, seen


@pytest.mark.exact
def test_500_random_schedules() -> None:
    seen = check_schedules("schedules", range(12, 512))
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("deepseek_v3", "sdpa")])
def test_models_without_packed_rows(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    # The last prompt is too long for padding, and gets its own pass.
    prompts = [[*PROMPT, number] for number in range(3)] + [[number % 50 for number in range(90)]]
    engine = Engine(model, NODES, max_rows=3)
    handles = [
        engine.submit(prompt, seed=7, do_sample=number == 1, max_new_tokens=20) for number, prompt in enumerate(prompts)
    ]
    engine.run()
    for number, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
        torch.manual_seed(7)
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=number == 1, max_new_tokens=20)
        assert handle.tokens == expected[0, len(prompt) :].tolist()
    assert engine.statistics.nodes > engine.statistics.rows


def test_rows_that_outgrow_the_memory_wait_and_go_on() -> None:
    model = build("llama")
    engine = Engine(model, LookaheadConfig(step_budget=4), kv_bytes=70 * token_bytes(model))
    requests = [RequestArguments(PROMPT, seed, {"max_new_tokens": 40, "do_sample": True}) for seed in range(4)]
    handles = [request.submit(engine) for request in requests]
    engine.run()
    assert engine.statistics.preempted > 0
    assert [handle.result()[0].tolist() for handle in handles] == [request.alone(model) for request in requests]


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


@pytest.fixture
def timed() -> Iterator[tuple[Engine, Any]]:
    """An engine and its clock, which counts the tokens sent to the model."""
    model, sent = build("llama"), list[int]()
    engine = Engine(model, LookaheadConfig(step_budget=1), max_rows=4, prompt_tokens=16)
    hook = (
        engine_model(model)
        .get_input_embeddings()
        .register_forward_pre_hook(lambda _, inputs: sent.append(inputs[0].numel()))
    )
    clock = engine._loop.scheduler._turns._clock = lambda: float(sum(sent))
    yield engine, clock
    hook.remove()


SHORT = [7, 8, 9, 10]


def seconds_of_a_short_one(engine: Engine, clock: Any) -> float:
    """Return the seconds of a short request from its arrival, just before a step."""
    begin = clock()
    short = engine.submit(SHORT, max_new_tokens=4, do_sample=False)
    while not short.done:
        engine.step()
    return float(clock() - begin)


def test_a_short_request_beside_a_long_prompt_takes_its_time_alone_and_a_step(timed: tuple[Engine, Any]) -> None:
    engine, clock = timed
    alone = min(seconds_of_a_short_one(engine, clock) for _ in range(2))  # the first one waits for trials
    long = engine.submit(PROMPT * 20, max_new_tokens=2, do_sample=False)
    for _ in range(3):
        engine.step()
        assert seconds_of_a_short_one(engine, clock) <= 2 * alone + 16
        assert not long.tokens
    several = [engine.submit([5, *PROMPT * 20], max_new_tokens=2, do_sample=False) for _ in range(2)]
    for _ in range(3):
        engine.step()
        assert seconds_of_a_short_one(engine, clock) <= 2 * alone + 16
    engine.run()
    assert all(handle.done for handle in (long, *several))


def test_prompts_of_several_requests_share_a_step(timed: tuple[Engine, Any]) -> None:
    engine, _ = timed
    handles = [engine.submit([first, *PROMPT * 8], max_new_tokens=1, do_sample=False) for first in (1, 2)]
    for _ in range(7):  # as many as one of them takes alone
        engine.step()
    assert not any(handle.tokens for handle in handles)
    endless = [engine.submit(SHORT * 3, max_new_tokens=400, do_sample=False, seed=1) for _ in range(2)]
    while not all(handle.done for handle in handles):
        engine.submit(SHORT[::-1] * 3, max_new_tokens=1, do_sample=False)
        engine.step()
        assert not endless[0].done, "long prompts have turns beside others"


def test_a_long_prompt_has_half_of_the_time_beside_other_texts(timed: tuple[Engine, Any]) -> None:
    engine, clock = timed
    for seed in range(3):
        engine.submit(SHORT, max_new_tokens=400, do_sample=True, seed=seed)
    for _ in range(3):
        engine.step()
    begin = clock()
    long = engine.submit(PROMPT * 20, max_new_tokens=1, do_sample=False)
    while not long.done:
        engine.step()
    assert 0.4 < len(PROMPT) * 20 / (clock() - begin) < 0.55


def test_answers_to_one_question_share_their_turns(timed: tuple[Engine, Any]) -> None:
    engine, clock = timed
    alone = min(seconds_of_a_short_one(engine, clock) for _ in range(2))  # the first one waits for trials
    requests = [RequestArguments(PROMPT, seed, {"max_new_tokens": 30, "do_sample": True}) for seed in range(8)]
    handles = [request.submit(engine, group="a") for request in requests]
    for _ in range(4):
        engine.step()
        assert seconds_of_a_short_one(engine, clock) <= 2 * alone + 4, "a token of each row is a step"
        assert not any(handle.done for handle in handles)
    other = [engine.submit(PROMPT, max_new_tokens=30, group="b", do_sample=True, seed=seed) for seed in range(4)]
    engine.step()
    before = [len(handle.tokens) for handle in (*handles, *other)]
    engine.step()
    grown = [len(handle.tokens) > count for handle, count in zip((*handles, *other), before, strict=True)]
    assert (sum(grown[:8]), sum(grown[8:])) == (2, 2)
    engine.run()
    assert [handle.result()[0].tolist() for handle in handles] == [
        request.alone(build("llama")) for request in requests
    ]
    assert all(handle.done for handle in other)


def test_a_waiting_request_is_not_overtaken_for_ever() -> None:
    engine = Engine(build("llama"), LookaheadConfig(step_budget=1), max_rows=1)
    first = engine.submit(PROMPT, max_new_tokens=2, do_sample=False)
    late = [engine.submit(PROMPT, max_new_tokens=2, do_sample=False) for _ in range(3)]
    urgent = engine.submit(PROMPT, priority=1, max_new_tokens=2, do_sample=False)
    order = []
    while engine.step():
        order += [handle for handle in (first, *late, urgent) if handle.done and handle not in order]
    assert order[:1] == [urgent]
    assert order[1:] == [first, *late][: len(order) - 1]


def test_drafts_are_shared_by_the_rows_of_a_step() -> None:
    model = build("llama")
    engine = Engine(model, NODES)
    sent: list[int] = []
    hook = (
        engine_model(model)
        .get_input_embeddings()
        .register_forward_pre_hook(lambda _, inputs: sent.append(inputs[0].shape[1]))
    )
    handles = [engine.submit(PROMPT, max_new_tokens=20, do_sample=False) for _ in range(6)]
    engine.step()
    sent.clear()
    engine.run()
    hook.remove()
    assert max(sent) <= 24
    assert max(len(handle.tokens) / handle.statistics.steps for handle in handles) > 1.1


def test_requests_take_over_memories_and_nothing_in_them() -> None:
    """Requests reuse the arrays of earlier memories, but draft as if they were the first."""
    model = copy.deepcopy(build("llama"))  # a new object without stored state
    engine, counts = Engine(model, LookaheadConfig(step_budget=8, memory="request")), []
    for _ in range(2):
        handles = [engine.submit(PROMPT, max_new_tokens=20, do_sample=False) for _ in range(2)]
        handles.append(engine.submit(PROMPT, max_new_tokens=20, do_sample=False))
        handles[-1].cancel()
        engine.run()
        spares = state_of(model).spares
        assert len(spares) == len(set(map(id, spares))) == 3
        counts.append([handle.statistics.steps for handle in handles[:2]])
        assert sum(spare.clock > 0 for spare in spares) == 2
    assert counts[0] == counts[1]


def test_readers_of_a_thread_and_of_asyncio() -> None:
    model = build("llama")
    requests = [
        RequestArguments(PROMPT[:length], length, {"max_new_tokens": 12, "do_sample": True}) for length in (4, 7)
    ]
    expected = [request.alone(model)[len(request.prompt) :] for request in requests]

    async def read(engine: Engine) -> list[list[int]]:
        async def tokens(request: RequestArguments) -> list[int]:
            return [token async for token in request.submit(engine)]

        return await asyncio.gather(*map(tokens, requests))

    with Engine(model, NODES) as engine:
        assert asyncio.run(read(engine)) == expected
        assert [list(request.submit(engine)) for request in requests] == expected
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.submit(PROMPT)
    # Without a thread, readers run the steps.
    engine = Engine(model, NODES)
    assert [list(request.submit(engine)) for request in requests] == expected
    assert asyncio.run(read(engine)) == expected


def test_closing_finishes_or_cancels_requests() -> None:
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


ENDS = """
import torch
from lookahead import Engine, LookaheadConfig
from model_zoo import build

matrix = torch.ones(300, 300)

def compute(ids, scores):
    for _ in range(100):
        torch.mm(matrix, matrix)
    return scores

engine = Engine(build("llama"), LookaheadConfig(preset="autoregressive"))
engine.start()
handle = engine.submit([3, 14, 15], max_new_tokens=200, do_sample=False, logits_processor=[compute])
while not handle.tokens:
    pass
"""


@pytest.mark.slow_by_nature("starts a process that imports torch")
def test_a_program_ends_while_its_engine_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", ENDS], env=environment, timeout=300).returncode == 0


def test_an_exception_in_a_processor_ends_its_own_request() -> None:
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
    calls.clear()
    engine = Engine(model)  # with adaptive pace
    alone = engine.submit(PROMPT, max_new_tokens=16, do_sample=False, logits_processor=[fails])
    engine.run()
    with pytest.raises(ArithmeticError, match="fifth"):
        alone.result()


def test_processors_that_fail_together_end_their_own_requests() -> None:
    """Rows with equal processors are sampled together."""
    model = build("llama")
    engine = Engine(model, NODES)
    options = {"max_new_tokens": 8, "do_sample": True}
    other = RequestArguments(PROMPT, 5, options)
    handle = other.submit(engine)
    broken = []
    for seed in range(2):
        warper = TopKLogitsWarper(5)
        warper.top_k = "five"
        broken.append(engine.submit(PROMPT, seed=seed, logits_processor=[warper], **options))
    engine.run()
    assert handle.result()[0].tolist() == other.alone(model)
    for one in broken:
        with pytest.raises(TypeError, match="str"):
            one.result()


def test_an_error_keeps_nothing_of_its_step() -> None:
    held = []

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        local = scores.clone()
        held.append(weakref.ref(local))
        raise ArithmeticError(f"of {local.shape[1]} tokens")

    engine = Engine(build("llama"), NODES)
    gc.disable()
    try:
        handle = engine.submit(PROMPT, max_new_tokens=16, do_sample=False, logits_processor=[fails])
        engine.run()
        assert held[0]() is None
    finally:
        gc.enable()
    with pytest.raises(ArithmeticError, match="tokens"):
        handle.result()


def test_stop_strings_scores_and_streamers(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids  # range(len(
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "stop_strings": ["(le"],
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


class OnDevice(torch.Tensor):
    """Tensor that numpy cannot read, as those of other devices."""

    def __array__(self, *arguments: object, **options: object) -> Any:
        raise TypeError("can't convert device type tensor to numpy")


def test_a_list_of_tensors_of_a_device_is_a_prompt() -> None:
    engine = Engine(build("llama"), NODES)
    prompt = [torch.tensor(token).as_subclass(OnDevice) for token in PROMPT]
    texts = [engine.submit(one, do_sample=False, max_new_tokens=4) for one in (prompt, PROMPT)]
    engine.run()
    assert torch.equal(texts[0].result(), texts[1].result())


def test_callers_may_reuse_a_prompt_after_submit() -> None:
    model, ids = build("llama"), torch.tensor([PROMPT])
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.5}
    expected = model.generate(ids, **options)
    engine = Engine(model, NODES)
    handle = engine.submit(ids, **options)
    ids.fill_(7)
    engine.run()
    assert torch.equal(handle.result(), expected)


def test_models_without_layers_have_no_keys_and_values() -> None:
    config = LlamaConfig(vocab_size=72, hidden_size=48, num_hidden_layers=0, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(torch.tensor([PROMPT]), **options)
    assert torch.equal(lookahead.generate(model, torch.tensor([PROMPT]), **options), expected)
    for limit in (None, 1000):
        with Engine(model, NODES, kv_bytes=limit) as engine:
            handles = [engine.submit(PROMPT, **options) for _ in range(3)]
            assert all(torch.equal(handle.result(), expected) for handle in handles)


def test_unsupported_arguments_are_refused() -> None:
    model = build("llama")
    engine = Engine(model, NODES, kv_bytes=60 * token_bytes(model))
    with pytest.raises(InvalidArgumentError, match="enough for 60 tokens"):
        engine.submit(PROMPT, max_new_tokens=100)
    with pytest.raises(UnsupportedArgumentError, match="2 rows"):
        engine.submit(torch.tensor([PROMPT, PROMPT]), max_new_tokens=4)
    with pytest.raises(UnsupportedArgumentError, match="num_beams"):
        engine.submit(PROMPT, max_new_tokens=4, num_beams=2)
    with pytest.raises(InvalidArgumentError, match="logprobs=-1"):
        engine.submit(PROMPT, max_new_tokens=4, logprobs=-1)
    with pytest.raises(InvalidArgumentError, match="prediction"):
        engine.submit(PROMPT, max_new_tokens=4, prediction=[0.5])
    with pytest.raises(UnsupportedArgumentError, match="prediction is not supported by preset='jacobi'"):
        engine.submit(PROMPT, max_new_tokens=4, prediction=[5], lookahead_config=LookaheadConfig(preset="jacobi"))
    with pytest.raises(InvalidArgumentError, match="kv_bytes=3"):
        Engine(model, kv_bytes=3)
    with pytest.raises(InvalidArgumentError, match="max_rows=0"):
        Engine(build("llama"), max_rows=0)
    with pytest.raises(UnsupportedArgumentError, match="invariant=True"):
        Engine(in_type("llama", torch.float64), LookaheadConfig(invariant=True))
    scaled = Engine(build("phi3_long_rope"), NODES)
    with pytest.raises(UnsupportedArgumentError, match="positions"):
        scaled.submit(PROMPT, max_new_tokens=100)
    assert engine.step() == 0


@pytest.mark.slow_by_nature("finds the rules of invariant products")
def test_rows_that_come_and_go_change_no_bit_where_passes_are_invariant() -> None:
    model, prompts = in_type("llama", torch.bfloat16), ([3, 14, 15, 9, 2, 6] * 2, [40, 3, 14, 7], [5, 5, 9, 5, 5, 9, 5])
    options = {"max_new_tokens": 14, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"do_sample": False}]
    plain = LookaheadConfig(preset="autoregressive", invariant=True)
    expected = []
    for prompt, way in zip(prompts, ways, strict=True):
        torch.manual_seed(4)
        expected.append(lookahead.generate(model, torch.tensor([prompt]), lookahead_config=plain, **options, **way))
    engine = Engine(model, LookaheadConfig(step_budget=16, invariant=True), prompt_tokens=5)
    handles = []
    for prompt, way in zip(prompts, ways, strict=True):
        handles.append(engine.submit(prompt, seed=4, **options, **way))
        engine.step()
        engine.step()
    engine.run()
    for handle, theirs in zip(handles, expected, strict=True):
        output: Any = handle.result()
        assert torch.equal(output.sequences, theirs.sequences)
        assert all(torch.equal(*pair) for pair in zip(output.logits, theirs.logits, strict=True))
        assert output.statistics.invariant_rows >= 1


def test_shared_prefixes_are_computed_once() -> None:
    model = build("llama")
    shared, options = PROMPT * 4, {"max_new_tokens": 6, "do_sample": False}
    requests = [RequestArguments([*shared, *range(1, 4 + number)], number, options) for number in range(4)]
    expected = [request.alone(model) for request in requests]
    for reuses in (True, False):
        engine = Engine(model, NODES, prefix_cache=reuses)
        handles = [request.submit(engine) for request in requests]  # together: three wait for the first one
        engine.run()
        turn = RequestArguments([*expected[0], 5, 6], 0, options)  # the next turn of a chat
        handles.append(turn.submit(engine))
        engine.run()
        texts = [handle.result()[0].tolist() for handle in handles]
        assert texts == [*expected, turn.alone(model)]
        reused = [handle.statistics.reused_tokens for handle in handles]
        assert reused == ([0, *[len(shared) + 3] * 3, len(expected[0]) - 1] if reuses else [0] * 5)
        assert (engine.statistics.hit_rate > 0.6) is reuses
        assert (engine.load.prefix_bytes > 0) is reuses


def test_finished_texts_make_room_for_running_ones() -> None:
    model = build("llama")
    size = token_bytes(model)
    engine = Engine(model, LookaheadConfig(step_budget=4), kv_bytes=120 * size)
    for number in range(6):
        request = RequestArguments([number + 1, *PROMPT * 3], 0, {"max_new_tokens": 8, "do_sample": False})
        handle = request.submit(engine)
        engine.run()
        assert handle.result()[0].tolist() == request.alone(model)
        assert 0 < engine.load.prefix_bytes <= 120 * size
    long = RequestArguments(PROMPT * 8, 0, {"max_new_tokens": 16, "do_sample": False})
    handle = long.submit(engine)
    engine.run()
    assert handle.result()[0].tolist() == long.alone(model)


def test_a_short_request_does_not_take_over_the_memory_of_a_long_text() -> None:
    model = build("llama")
    engine = Engine(model, LookaheadConfig(step_budget=4), kv_bytes=90 * token_bytes(model))
    engine.submit(PROMPT * 2, max_new_tokens=60, do_sample=False).result()
    request = RequestArguments([*PROMPT * 2, 5], 0, {"max_new_tokens": 2, "do_sample": False})
    handle = request.submit(engine)
    assert handle.result()[0].tolist() == request.alone(model)
    assert handle.statistics.reused_tokens == 0


@pytest.mark.parametrize("kv_bytes", [None, 400])
def test_finished_texts_have_a_bound_of_their_own(kv_bytes: int | None) -> None:
    model = build("llama")
    size = token_bytes(model)
    limits: Any = {"kv_bytes": kv_bytes and kv_bytes * size, "prefix_bytes": 70 * size}
    engine = Engine(model, LookaheadConfig(step_budget=4), **limits)
    held = []
    for number in range(4):
        request = RequestArguments([number + 1, *PROMPT * 3], 0, {"max_new_tokens": 8, "do_sample": False})
        handle = request.submit(engine)
        engine.run()
        assert handle.result()[0].tolist() == request.alone(model)
        held.append(engine.load.prefix_bytes)
    assert 0 < max(held) <= 70 * size


def test_free_memory_is_that_of_the_container(tmp_path: Path) -> None:
    whole = free_bytes(torch.device("cpu"))
    assert 0 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("7\n")
    assert of_the_group(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert of_the_group(tmp_path) == [993]
    (tmp_path / "memory.current").write_text("1007\n")
    assert of_the_group(tmp_path) == [0]


def test_log_probabilities_equal_the_models() -> None:
    model = build("llama")
    options = {"max_new_tokens": 10, "do_sample": False, "repetition_penalty": 1.5}
    expected = model.generate(torch.tensor([PROMPT]), **options, output_logits=True, return_dict_in_generate=True)
    engine = Engine(model, NODES)
    events = list(engine.submit(PROMPT, logprobs=3, **options).events())
    assert [event.token for event in events] == expected.sequences[0, len(PROMPT) :].tolist()
    for event, logits in zip(events, expected.logits, strict=True):
        logprobs = logits[0].log_softmax(-1)
        assert event.logprob == pytest.approx(float(logprobs[event.token]), abs=1e-4)
        assert [token for token, _ in event.top] == logprobs.topk(3).indices.tolist()
        assert [value for _, value in event.top] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)


def test_a_predicted_text_saves_steps_and_changes_nothing() -> None:
    model = build("llama")
    request = RequestArguments(PROMPT, 3, {"max_new_tokens": 40, "do_sample": True})
    text = request.alone(model)[len(PROMPT) :]
    changed = [*text[:15], 1, *text[16:]]
    steps = []
    for prediction in (None, text, changed):
        guess = {} if prediction is None else {"prediction": torch.tensor(prediction)}
        handle = request.submit(Engine(model, LookaheadConfig(step_budget=12)), **guess)
        assert handle.result()[0, len(PROMPT) :].tolist() == text
        steps.append(handle.statistics.steps)
        assert handle.statistics.predicted_tokens == {None: 0}.get(
            prediction and 1, sum(map(int.__eq__, text, prediction or []))
        )
    assert max(steps[1:]) < 0.6 * steps[0]


def test_finished_requests_are_freed_at_once() -> None:
    held: list[weakref.ref[Any]] = []

    def drafter() -> NoDrafter:
        held.append(weakref.ref(made := NoDrafter()))
        return made

    engine = Engine(build("llama"), LookaheadConfig(drafter=drafter))
    gc.collect()
    gc.disable()
    try:
        handle = engine.submit(PROMPT, max_new_tokens=6, do_sample=False)
        engine.step()
        assert held[-1]() is not None
        engine.run()
        assert handle.done
        assert [ref() for ref in held if ref() is not None] == []
    finally:
        gc.enable()


def test_finish_reason_is_stop_length_or_cancelled() -> None:
    engine = Engine(build("llama"), NODES)
    text = engine.submit(PROMPT, max_new_tokens=6, do_sample=False)
    ended = engine.submit(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=list(text)[2])
    gone = engine.submit(PROMPT, max_new_tokens=6, do_sample=False)
    assert gone.finish_reason is None
    gone.cancel()
    engine.run()
    assert [handle.finish_reason for handle in (text, ended, gone)] == ["length", "stop", "cancelled"]
    assert text.statistics.first_token_seconds is not None
    assert text.statistics.total_seconds is not None
    assert engine.load.running == engine.load.waiting == engine.load.kv_bytes == 0


def test_done_callbacks_are_called_once() -> None:
    engine = Engine(build("llama"), NODES)
    whole, cut = (engine.submit(PROMPT, max_new_tokens=6, do_sample=False) for _ in range(2))
    calls: list[str] = []
    whole.add_done_callback(lambda: calls.append(f"whole {whole.finish_reason}"))
    cut.add_done_callback(lambda: calls.append(f"cut {cut.finish_reason}"))
    cut.cancel()
    assert calls == []
    engine.run()
    assert sorted(calls) == ["cut cancelled", "whole length"]
    whole.add_done_callback(lambda: calls.append("late"))
    assert calls[2:] == ["late"]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_callback_that_waits_for_its_engine_ends_only_its_own_request(threaded: bool) -> None:
    model = build("llama")
    engine = Engine(model, NODES)
    other = RequestArguments(PROMPT[:5], 0, {"max_new_tokens": 30, "do_sample": False})
    running = other.submit(engine)
    waits = other.submit(engine, on_step=lambda record: running.result())
    closes = other.submit(engine, on_step=lambda record: engine.close())
    if threaded:
        engine.start()
    for failing in (waits, closes):
        with pytest.raises(InvalidArgumentError, match=r"runs a step now.*in another thread"):
            failing.result()
    assert running.result()[0].tolist() == other.alone(model)
    engine.close()


class Panic(BaseException):
    """As raised by extensions in Rust."""


class Panicking:
    """User code that panics where `place` says; `end` is the end of a streamer, the others are calls."""

    top_k = 0
    together = None

    def __init__(self, place: str) -> None:
        self.place = place

    def panic(self, place: str) -> None:
        if self.place == place:
            raise Panic(place)

    def __call__(self, *values: Any) -> Any:
        self.panic("call")
        return values[-1]

    def put(self, value: Any) -> None:
        self.panic("put")

    def end(self) -> None:
        self.panic("end")


@pytest.mark.parametrize("place", ["on_step", "processor", "criterion", "put", "end"])
@pytest.mark.parametrize("threaded", [False, True])
def test_errors_that_are_no_exceptions_end_their_own_request(place: str, threaded: bool) -> None:
    model, fails = build("llama"), Panicking(place if place in ("put", "end") else "call")
    arguments: dict[str, Any] = {
        "on_step": {"on_step": fails},
        "processor": {"logits_processor": [fails]},
        "criterion": {"stopping_criteria": [fails]},
    }
    engine = Engine(model, NODES)
    other = RequestArguments(PROMPT[:5], 0, {"max_new_tokens": 30, "do_sample": False})
    running = other.submit(engine)
    broken = other.submit(engine, **arguments.get(place, {"streamer": fails}))
    if threaded:
        engine.start()
    with pytest.raises(Panic):
        broken.result()
    assert running.result()[0].tolist() == other.alone(model)
    assert other.submit(engine).result()[0].tolist() == other.alone(model)
    engine.close()


def test_a_drafter_that_panics_stops_only_drafts() -> None:
    class Panics(NoDrafter):
        def propose(self, tree: Any) -> None:
            raise Panic

    model = build("llama")
    request = RequestArguments(PROMPT, 0, {"max_new_tokens": 8, "do_sample": False})
    with (
        Engine(model, LookaheadConfig(drafter=Panics)) as engine,
        pytest.warns(lookahead.LookaheadWarning, match="Panic"),
    ):
        assert request.submit(engine).result()[0].tolist() == request.alone(model)


def test_ctrl_c_in_a_callback_ends_the_step() -> None:
    def interrupts(record: Any) -> None:
        raise KeyboardInterrupt

    engine = Engine(build("llama"), NODES)
    engine.submit(PROMPT, max_new_tokens=8, on_step=interrupts)
    with pytest.raises(KeyboardInterrupt):
        engine.step()


@pytest.mark.parametrize("name", ["group", "tenant"])
@pytest.mark.parametrize("value", [[], {}, torch.zeros(2)])
def test_a_group_without_a_hash_is_refused_and_ends_no_other_request(name: str, value: Any) -> None:
    model = build("llama")
    request = RequestArguments(PROMPT, 0, {"max_new_tokens": 8, "do_sample": False})
    with Engine(model, NODES) as engine:
        with pytest.raises(InvalidArgumentError, match=f"{name}=.* must be hashable, such as"):
            request.submit(engine, **{name: value})
        assert request.submit(engine).result()[0].tolist() == request.alone(model)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_neither_copied_nor_pickled(duplicate: Any) -> None:
    engine = Engine(build("llama"), NODES)
    for one in (engine, engine.submit(PROMPT, max_new_tokens=2)) if duplicate is not copy.copy else (engine,):
        with pytest.raises(InvalidArgumentError, match="cannot be copied or pickled; make another Engine"):
            duplicate(one)


def test_the_thread_of_an_engine_has_the_autocast_mode_of_its_start() -> None:
    model, prompt = build("llama"), torch.tensor([[5, 8, 2, 5, 8, 2, 5]])
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    modes = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model.generate(prompt, **options)
        with Engine(model, LookaheadConfig(step_budget=8)) as engine:
            text = engine.submit(
                prompt, on_step=lambda _: modes.append(torch.is_autocast_enabled("cpu")), **options
            ).result()
    assert torch.equal(text, expected)
    assert all(modes)
