"""Engines on the simulated CUDA device: texts, and the host's waits in a step.

`test_simulated_cuda.py` runs this file in a separate process; see `simulated_cuda_cases.py`.
"""

from __future__ import annotations

import copy
import gc
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from compared.doors import token_bytes
from lookahead import Engine, LookaheadConfig, LookaheadError, LookaheadWarning
from lookahead.backends.machine import Staged
from lookahead.backends.transformers.pooled_rows import FIRST_TOKENS, PROMPT_SIZES, PooledRunner
from lookahead.serving.loop import EngineLoop
from model_zoo import ARCHITECTURES, build, in_type
from quick import quickly
from simulated_cuda import (
    CAPTURE,
    OPERATION,
    PINNED,
    REPLAY,
    WAIT,
    Event,
    Simulation,
    on_cuda,
    shared_on_cuda,
    without_simulation,
)
from simulated_cuda_cases import GREEDY, PROMPT, SAMPLED, of_steps, to_host
from tiny.families import build as build_family
from tiny.images import image_prompt
from tiny.variant import Variant

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
EIGHT = LookaheadConfig(step_budget=8)
UNCAPTURED = LookaheadConfig(step_budget=8, engine="dynamic")


def new_tokens(model: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, **options: Any) -> list[int]:
    """Return the new tokens of `model.generate` on the CPU."""
    torch.manual_seed(0 if seed is None else seed)
    with without_simulation():
        tokens: list[int] = model.generate(ids, **{**OPTIONS, **options})[0, ids.shape[1] :].tolist()
    return tokens


def loop_of(engine: Engine) -> EngineLoop:
    """The loop of an engine."""
    return engine._loop


def runner_of(engine: Engine) -> PooledRunner:
    """The runner of an engine that has a pool."""
    runner = loop_of(engine).runner
    assert isinstance(runner, PooledRunner)
    return runner


def pool_of(engine: Engine) -> Any:
    """Return the pool of an engine with one."""
    return runner_of(engine)._pool


MOST_OF_A_STEP = {
    ("auto", 1): (1, 2),
    ("auto", 4): (1, 2),
    ("auto", 16): (1, 2),
    ("dynamic", 1): (1, 11),
    ("dynamic", 4): (1, 13),
}
"""Largest averages of waits and operations in a step, by engine and rows, after all rows have joined. The bounds must
not rise."""


@pytest.mark.parametrize("kind", quickly(MOST_OF_A_STEP, [("auto", 4), ("dynamic", 4)]))
def test_steps_wait_as_often_as_they_must(
    kind: tuple[str, int], device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    name, rows = kind
    prompts = [demo_prompt[:, : 200 - 7 * row] for row in range(rows)]
    config = LookaheadConfig(memory="process", step_budget=8 * rows, engine=name)
    options = {**OPTIONS, "max_new_tokens": 32, **GREEDY}
    if kind == ("auto", 4):
        engine, options["lookahead_config"] = engine_of_eight(demo_model), config
    else:
        engine = Engine(shared_on_cuda(demo_model), config, max_rows=rows)
    handles = [engine.submit(ids.to("cuda"), **options) for ids in prompts]
    options.pop("lookahead_config", None)
    totals, steps = [0], []
    while engine.step() == rows:
        totals.append(engine.statistics.nodes)
        steps.append(device.take())
    engine.run()
    for ids, handle in list(zip(prompts, handles, strict=True))[::7]:
        assert handle.tokens == new_tokens(demo_model, ids, **options)
        assert handle.statistics.engine == ("static" if name == "auto" else "dynamic")
    counted = [(after - before, events) for (before, after), events in zip(pairwise(totals), steps, strict=True)][2:]
    waits, operations = of_steps(counted, range(rows + 1, 8 * rows + 1))
    print(f"engine of {rows}, {name}: {waits:.2f} waits, {operations:.1f} operations")
    most_waits, most_operations = MOST_OF_A_STEP[kind]
    assert waits <= most_waits
    assert operations <= most_operations
    kinds = {event.kind for events in steps[1:] for event in events}
    assert (REPLAY in kinds) == (name == "auto")
    assert CAPTURE not in kinds


@cache
def engine_of_eight(model: PreTrainedModel) -> Engine:
    """Return the engine of eight rows that tests share: it captures passes of up to 1,024 nodes once."""
    config = LookaheadConfig(memory="process", step_budget=32)
    return Engine(shared_on_cuda(model), config, max_rows=8, prefix_cache=False)


def events_of_four_steps(
    device: Simulation, model: PreTrainedModel, prompt: torch.Tensor, config: LookaheadConfig, options: dict[str, Any]
) -> list[Event]:
    """Return the events of four steps of eight requests that wait once a step; their texts equal the CPU's."""
    engine = engine_of_eight(model)
    prompts = [prompt[:, : 90 - row] for row in range(8)]
    handles = [
        engine.submit(ids.to("cuda"), seed=row, lookahead_config=config, **options) for row, ids in enumerate(prompts)
    ]
    for _ in range(4):
        engine.step()
    device.take()
    for _ in range(4):
        engine.step()
    events = device.take()
    engine.run()
    assert sum(event.kind == WAIT for event in events) == 4
    for row in (0, 3, 7):
        assert handles[row].tokens == new_tokens(model, prompts[row], row, **options)
    return events


MOST_OF_A_SAMPLED_STEP = {"temperature": ({"top_k": 0}, 25), "top-k, top-p": ({"top_k": 50, "top_p": 0.9}, 37)}
"""Settings of sampling, and the largest number of operations in a step of 8 rows."""


@pytest.mark.parametrize("kind", MOST_OF_A_SAMPLED_STEP)
def test_rows_that_are_set_alike_are_sampled_together(
    kind: str, device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    how, most_operations = MOST_OF_A_SAMPLED_STEP[kind]
    options = {**OPTIONS, "max_new_tokens": 16, "do_sample": True, "temperature": 0.8, **how}
    config = LookaheadConfig(memory="request", step_budget=32)
    events = events_of_four_steps(device, demo_model, demo_prompt, config, options)
    assert sum(event.kind == OPERATION and not event.in_model for event in events) <= 4 * most_operations


def test_scores_of_rows_that_are_sampled_together(device: Simulation) -> None:
    """Each token has the scores of its own node, in trees of several rows."""
    model = build("llama")
    options = {**OPTIONS, "do_sample": True, "temperature": 0.02, "top_k": 20}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    config = LookaheadConfig(memory="request", step_budget=24, engine="dynamic")
    engine = Engine(shared_on_cuda(model), config, max_rows=3)
    prompts = [PROMPT[:, row:] for row in range(3)]
    handles = [engine.submit(ids.to("cuda"), seed=row, **options) for row, ids in enumerate(prompts)]
    engine.run()
    for row, (ids, handle) in enumerate(zip(prompts, handles, strict=True)):
        torch.manual_seed(row)
        with without_simulation():
            expected = model.generate(ids, **options)
        assert handle.tokens == expected.sequences[0, ids.shape[1] :].tolist()
        scores = torch.cat([to_host(one) for one in handle.result().scores])
        torch.testing.assert_close(scores, torch.cat(expected.scores), atol=1e-3, rtol=1e-3)
    assert engine.statistics.steps < 20, "drafts are accepted"


@pytest.mark.parametrize("samples", [False, True])
def test_rows_whose_processors_use_the_text_wait_once(
    samples: bool, device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    options = {**OPTIONS, "repetition_penalty": 1.2, "no_repeat_ngram_size": 4, "min_new_tokens": 4, "eos_token_id": 1}
    options |= {"do_sample": True, "temperature": 0.9, "top_p": 0.9} if samples else GREEDY
    events_of_four_steps(device, demo_model, demo_prompt, LookaheadConfig(preset="autoregressive"), options)


def test_an_error_of_a_users_processor_ends_its_request(device: Simulation) -> None:
    """Such a processor is called once for each token, and its error is raised even if another call would succeed."""
    calls = []

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        if len(calls) == 3:
            raise ArithmeticError("the third token")
        return scores

    engine = Engine(shared_on_cuda(build("llama")), UNCAPTURED, max_rows=2)
    handle = engine.submit(PROMPT.to("cuda"), **OPTIONS, **GREEDY, logits_processor=[fails])
    engine.run()
    with pytest.raises(ArithmeticError, match="third"):
        handle.result()
    assert len(set(calls)) == len(calls)


@pytest.mark.parametrize("samples", [False, True])
def test_drafts_of_rows_with_a_repetition_penalty_wait_once(
    samples: bool, device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    """All rows take one set of operations and two copies more."""
    options = {**OPTIONS, "repetition_penalty": 1.05}
    options |= {"do_sample": True, "temperature": 0.5, "top_p": 0.9} if samples else GREEDY
    config = LookaheadConfig(memory="process", step_budget=32)
    events = events_of_four_steps(device, demo_model, demo_prompt, config, options)
    assert sum(event.kind == OPERATION and not event.in_model for event in events) <= 4 * 50
    assert sum(event.kind == PINNED for event in events) <= 4 * 4


@pytest.mark.parametrize("name", quickly(ARCHITECTURES, []))
@pytest.mark.filterwarnings("ignore::lookahead.LookaheadWarning")
def test_texts_of_all_families_equal_the_cpus(name: str, device: Simulation) -> None:
    """Rows join and leave, at most three at a time, without captures after the start."""
    model = build(name, attention=ARCHITECTURES[name].attention[0])
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=3)
    texts = [PROMPT[:, : 15 - 2 * row] for row in range(3)]
    device.take()
    handles = [
        (
            ids,
            options,
            row,
            engine.submit(ids.to("cuda"), seed=row, **{**OPTIONS, **options, "max_new_tokens": 9 + 4 * row}),
        )
        for row, ids in enumerate(texts)
        for options in (GREEDY, SAMPLED)
    ]
    engine.run()
    events = {event.kind for event in device.take()}
    for ids, options, row, handle in handles:
        assert handle.tokens == new_tokens(model, ids, row, **options, max_new_tokens=9 + 4 * row), options
    assert CAPTURE not in events
    print(name, "graphs" if REPLAY in events else "eager")


def with_small_memory(device: Simulation, model: PreTrainedModel, max_rows: int, **options: Any) -> Engine:
    """Return an engine whose device refused half of its memory."""
    with device.without_memory(1 << 20):
        engine = Engine(shared_on_cuda(model), EIGHT, max_rows=max_rows, **options)
    assert pool_of(engine).capacity == max_rows * FIRST_TOKENS + pool_of(engine).block
    return engine


def test_engines_take_half_of_the_memory_at_the_start(device: Simulation) -> None:
    model = build("llama")
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=1)
    taken = sum(buffer.nbytes for buffer in pool_of(engine).buffers)
    assert taken == pytest.approx(torch.cuda.mem_get_info()[0] / 2, rel=0.01)
    assert engine.load.kv_limit_bytes == pytest.approx(taken, rel=0.01)


def test_a_pool_that_is_too_small_grows(device: Simulation) -> None:
    """The pool's memory and pages grow, and graphs are captured again for the larger pool."""
    model = build("qwen2_mixed_sliding")
    engine = with_small_memory(device, model, 1)
    before, captured = pool_of(engine).capacity, engine.statistics.graphs.count
    assert captured == len(runner_of(engine).pass_sizes) + len(PROMPT_SIZES)
    prompt = torch.randint(3, 60, (1, FIRST_TOKENS - 8), generator=torch.Generator().manual_seed(0))
    handle = engine.submit(prompt.to("cuda"), **{**OPTIONS, **GREEDY})
    engine.run()
    assert handle.tokens == new_tokens(model, prompt, **GREEDY)
    assert pool_of(engine).capacity > before
    assert engine.statistics.graphs.count > captured
    assert engine.statistics.graphs.seconds > 0


OUTGROWING = torch.randint(3, 60, (1, FIRST_TOKENS - 14), generator=torch.Generator().manual_seed(0))
"""Prompt of a text that begins in the initial capacity of a row, and outgrows it."""


@pytest.mark.parametrize("requests", quickly([8, 40], [8]))
def test_a_pool_that_cannot_grow_makes_requests_wait(requests: int, device: Simulation) -> None:
    """On a device without memory for a larger pool all requests get their texts."""
    model = build("llama")
    engine = with_small_memory(device, model, 2, prefix_cache=False)
    capacity = pool_of(engine).capacity
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 12}
    handles = [engine.submit(OUTGROWING.to("cuda"), **options) for _ in range(requests)]
    with pytest.warns(LookaheadWarning, match="keys and values cannot grow beyond"), device.without_memory():
        engine.run()
    text = new_tokens(model, OUTGROWING, **options)
    assert [handle.tokens for handle in handles] == [text] * requests
    assert engine.statistics.preempted > 0
    assert pool_of(engine).capacity == capacity
    assert engine.load.kv_limit_bytes == (capacity - pool_of(engine).block) * token_bytes(model)


def test_a_text_that_outgrows_the_device_ends_alone(device: Simulation) -> None:
    model = build("llama")
    engine = with_small_memory(device, model, 1, prefix_cache=False)
    prompts = OUTGROWING, PROMPT
    long, short = (engine.submit(ids.to("cuda"), **OPTIONS, **GREEDY) for ids in prompts)
    with device.without_memory(), pytest.raises(LookaheadError, match="too little memory for the keys and values"):
        engine.run()
    with device.without_memory():
        engine.run()
    assert short.tokens == new_tokens(model, PROMPT, **GREEDY)
    with pytest.raises(LookaheadError, match="too little memory for the keys and values"):
        long.result()


def test_a_capture_that_fails_leaves_its_passes_unrecorded(device: Simulation) -> None:
    model = build("llama")
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=1)
    device.captures_fail = True
    handle = engine.submit(OUTGROWING.to("cuda"), **OPTIONS, **GREEDY)
    try:
        with pytest.warns(LookaheadWarning, match="CUDA graph cannot be captured .no memory"):
            engine.run()
    finally:
        device.captures_fail = False
    assert handle.tokens == new_tokens(model, OUTGROWING, **GREEDY)


@pytest.mark.exact
def test_limited_memory_is_taken_once_and_given_back(device: Simulation) -> None:
    """More requests than the memory holds: some are preempted, and ended requests free their pages."""
    model = build("llama")
    there = shared_on_cuda(model)
    size = token_bytes(model)
    engine = Engine(there, EIGHT, max_rows=4, kv_bytes=200 * size, prefix_cache=False)
    pool = pool_of(engine)
    capacity, pages = pool.capacity, len(pool.free)
    assert capacity <= 200 + 2 * pool.block
    prompts = [PROMPT[:, : 15 - row] for row in range(4)]
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 80}
    handles = [engine.submit(ids.to("cuda"), **options) for ids in prompts]
    engine.run()
    for ids, handle in zip(prompts, handles, strict=True):
        assert handle.tokens == new_tokens(model, ids, **options)
    assert engine.statistics.preempted > 0
    assert pool.capacity == capacity
    runner_of(engine).rows = []
    del handles
    gc.collect()
    assert len(pool.free) == pages


def test_handles_are_notified_during_the_next_pass(device: Simulation) -> None:
    """In continuous steps, tokens of a step arrive while the device computes the next one; the last ones at once."""
    model = build("llama")
    engine = Engine(shared_on_cuda(model), LookaheadConfig(preset="autoregressive"), max_rows=2)
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 9}
    handles = [engine.submit(PROMPT[:, row:].to("cuda"), **options) for row in range(2)]
    engine.step()
    received = []
    while not handles[1].done:
        loop_of(engine).step([], is_continuous=True)
        received.append(len(handles[0].tokens))
    assert received == [1, 2, 3, 4, 5, 6, 7, 9]
    for row, handle in enumerate(handles):
        assert handle.tokens == new_tokens(model, PROMPT[:, row:], **options)


def test_texts_reuse_prefixes_of_others(device: Simulation) -> None:
    """Finished and running texts provide prefixes; a long prompt is read in parts, larger than captured passes."""
    model = build("llama")
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=2, prompt_tokens=300)
    long = torch.randint(3, 60, (1, 450), generator=torch.Generator().manual_seed(0))
    texts = [long, long[:, :-5], torch.cat([long[:, :-5], PROMPT], dim=1)]
    options = {**OPTIONS, **GREEDY}
    handles = [engine.submit(texts[0].to("cuda"), **options)]
    engine.run()
    handles += [engine.submit(text.to("cuda"), **options) for text in texts[1:]]
    engine.run()
    for text, handle in zip(texts, handles, strict=True):
        assert handle.tokens == new_tokens(model, text, **options)
    assert all(handle.statistics.reused_tokens >= long.shape[1] - 6 for handle in handles[1:])


def test_prompts_of_all_sizes_are_read_by_captured_passes(device: Simulation) -> None:
    """While texts are decoded, prompts of 90 to 960 tokens arrive: no pass runs kernel by kernel."""
    model = build("llama")
    sizes = 300, 700, 90, 960, 513
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=6, kv_bytes=6400 * token_bytes(model))
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 40}
    random = torch.Generator().manual_seed(0)
    prompts = [PROMPT, *(torch.randint(3, 60, (1, size), generator=random) for size in sizes)]
    handles = [engine.submit(prompts[0].to("cuda"), **options)]
    engine.step()
    device.take()
    steps: list[list[Event]] = []
    for prompt in prompts[1:]:
        handles.append(engine.submit(prompt.to("cuda"), **options))
        device.take()
        for _ in range(2):
            engine.step()
            steps.append(device.take())
    while engine.step():
        steps.append(device.take())
    for ids, handle in zip(prompts, handles, strict=True):
        assert handle.tokens == new_tokens(model, ids, **options)
    for events in steps[:-1]:
        kinds = [event.kind for event in events]
        assert kinds.count(REPLAY) == kinds.count(WAIT) == 1
        assert PINNED in kinds
        assert not any(event.kind == OPERATION and event.in_model for event in events)
        assert CAPTURE not in kinds


def test_rows_with_a_common_beginning_share_its_pages(device: Simulation) -> None:
    """64 requests with one prompt of 600 tokens run at once in the memory of one, and 64 short ends."""
    model = build("llama")
    size = token_bytes(model)
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=64, kv_bytes=(640 + 64 * 3 * 64) * size)
    common = torch.randint(3, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    texts = [torch.cat([common, torch.tensor([[3 + row % 50, 5, 7 + row // 50]])], dim=1) for row in range(64)]
    handles = [engine.submit(text.to("cuda"), **OPTIONS, **GREEDY) for text in texts]
    engine.step()
    assert engine.load.running == 64, "pages that will be shared are not reserved twice"
    while len(handles[-1].tokens) < 8:
        engine.step()
    pool = pool_of(engine)
    taken = np.count_nonzero(pool.uses)
    assert engine.load.running == 64
    assert taken * pool.block <= 640 + 64 * 2 * pool.block
    assert engine.load.kv_bytes == taken * pool.block * size
    engine.run()
    assert engine.statistics.preempted == 0
    for row in (0, 1, 31, 63):
        assert handles[row].tokens == new_tokens(model, texts[row], **GREEDY)
    engine.submit(torch.flip(common, [1]).repeat(1, 2).to("cuda"), **OPTIONS, **GREEDY)
    engine.run()
    assert all(pool.uses >= 0)
    assert len(pool.free) == np.count_nonzero(pool.uses[1:] == 0)


def with_384_tokens(model: PreTrainedModel, **options: Any) -> Engine:
    """Return an engine with memory for keys and values of 384 tokens."""
    return Engine(shared_on_cuda(model), UNCAPTURED, max_rows=2, kv_bytes=384 * token_bytes(model), **options)


@pytest.mark.filterwarnings("error::lookahead.LookaheadWarning")
def test_pages_of_finished_and_running_texts_count_once(device: Simulation) -> None:
    """A finished text stays, although a running one continues another finished text in the rest of the memory."""
    model = build("llama")
    engine = with_384_tokens(model)
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 2}
    tokens = torch.randint(3, 60, (1, 400), generator=torch.Generator().manual_seed(0))
    first, second, longer = tokens[:, :100], tokens[:, 100:250], tokens[:, 100:300]
    for text in (first, second, longer):
        engine.submit(text.to("cuda"), **options)
        engine.run()
    last = torch.cat([first, tokens[:, 300:304]], dim=1)
    handle = engine.submit(last.to("cuda"), **options)
    engine.run()
    assert handle.tokens == new_tokens(model, last, **options)
    assert handle.statistics.reused_tokens == first.shape[1]


def test_texts_without_a_prefix_cache_take_their_own_pages(device: Simulation) -> None:
    """Two equal prompts of more than half of the memory run one after the other."""
    model = build("llama")
    engine = with_384_tokens(model, prefix_cache=False)
    text = torch.randint(3, 60, (1, 230), generator=torch.Generator().manual_seed(0))
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 4}
    handles = [engine.submit(text.to("cuda"), **options) for _ in range(2)]
    engine.step()
    assert (engine.load.running, engine.load.waiting) == (1, 1)
    engine.run()
    assert [handle.tokens for handle in handles] == [new_tokens(model, text, **options)] * 2


@pytest.mark.parametrize("seed", quickly(range(8), [0]))
def test_random_requests_with_common_beginnings_in_a_small_memory(seed: int, device: Simulation) -> None:
    """Requests that come, share pages, are preempted and cancelled: all others get their texts, and no page is lost."""
    random = np.random.default_rng(seed)
    model = build(["llama", "qwen2_mixed_sliding"][seed % 2])
    tokens = int(random.integers(200, 500))
    engine = Engine(
        shared_on_cuda(model), EIGHT, max_rows=int(random.integers(2, 7)), kv_bytes=tokens * token_bytes(model)
    )
    pool = pool_of(engine)
    capacity = pool.capacity
    stems = [random.integers(3, 60, int(random.integers(20, 120))).tolist() for _ in range(3)]
    requests = []
    for number in range(16):
        stem = stems[random.integers(3)]
        text = stem[: random.integers(1, len(stem) + 1)] + random.integers(3, 60, int(random.integers(1, 9))).tolist()
        options = {**OPTIONS, **(GREEDY if number % 3 else SAMPLED), "max_new_tokens": int(random.integers(1, 40))}
        handle = engine.submit(text, seed=number, priority=int(random.integers(2)), **options)
        requests.append((torch.tensor([text]), number, options, handle))
        for _ in range(random.integers(6)):
            engine.step()
        if number % 7 == 6:
            handle.cancel()
    engine.run()
    for ids, number, options, handle in requests:
        if not handle.cancelled:
            assert handle.tokens == new_tokens(model, ids, number, **options)
    assert pool.capacity == capacity
    loop_of(engine).memory.forget()
    runner_of(engine).rows = []
    requests.clear()
    del handle
    gc.collect()
    assert len(pool.free) == len(pool.uses) - 1
    assert not pool.uses.any()


@pytest.mark.parametrize("how", [GREEDY, {**SAMPLED, "repetition_penalty": 1.2}])
def test_log_probabilities_take_no_further_wait(
    how: dict[str, Any], device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    prompts = [demo_prompt[:, : 100 - row] for row in range(2)]
    options = {**OPTIONS, **how}
    engine, config = engine_of_eight(demo_model), LookaheadConfig(memory="request", step_budget=16)
    counts = (3, 12)
    handles = [
        engine.submit(ids.to("cuda"), seed=row, logprobs=count, lookahead_config=config, **options)
        for row, (ids, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    engine.step()
    steps: list[list[Event]] = []
    device.take()
    while engine.step() == 2:
        steps.append(device.take())
    engine.run()
    assert {sum(event.kind == WAIT for event in events) for events in steps} == {1}
    for row, (ids, handle, count) in enumerate(zip(prompts, handles, counts, strict=True)):
        assert handle.tokens == new_tokens(demo_model, ids, row, **options)
        with without_simulation(), torch.no_grad():
            logits = demo_model(torch.cat([ids, torch.tensor([handle.tokens])], dim=1)).logits[0, ids.shape[1] - 1 :]
            expected = logits.log_softmax(-1)
        for event, logprobs in zip(handle.events(), expected, strict=False):
            assert event.logprob == pytest.approx(float(logprobs[event.token]), abs=1e-3)
            assert [value for _, value in event.top] == pytest.approx(logprobs.topk(count).values.tolist(), abs=1e-3)
            assert [float(logprobs[token]) for token, _ in event.top] == pytest.approx(
                logprobs.topk(count).values.tolist(), abs=1e-3
            )


@pytest.mark.exact
@pytest.mark.parametrize("family", ["qwen2_5_vl/multimodal", "gemma3"])
def test_texts_after_images_equal_the_cpus(family: str, device: Simulation) -> None:
    model = build_family(family, Variant(window=12), "sdpa")
    inputs = image_prompt(model, [PROMPT[0].tolist()], 0)
    engine = Engine(shared_on_cuda(model), EIGHT, max_rows=2)
    moved = {name: value.to("cuda:0") for name, value in inputs.items() if name != "input_ids"}
    options = {"max_new_tokens": 16, **GREEDY}
    handles = [
        engine.submit(inputs["input_ids"].to("cuda:0"), **moved, **options),
        engine.submit(PROMPT.to("cuda:0"), **options),
    ]
    engine.run()
    length = inputs["input_ids"].shape[1]
    assert handles[0].tokens == model.generate(**inputs, **options)[0, length:].tolist()
    assert handles[1].tokens == model.generate(PROMPT, **options)[0, PROMPT.shape[1] :].tolist()


@pytest.mark.exact
def test_another_model_is_captured_anew(device: Simulation) -> None:
    model, other = build("llama", seed=0), copy.deepcopy(build("llama", seed=1))
    there = on_cuda(copy.deepcopy(model))
    engine = Engine(there, EIGHT, max_rows=2)
    options = {**OPTIONS, **GREEDY}
    handle = engine.submit(PROMPT.to("cuda"), **options)
    engine.run()
    assert handle.tokens == new_tokens(model, PROMPT, **options)
    on_cuda(other)
    for parameter, new in zip(there.parameters(), other.parameters(), strict=True):
        parameter.host = new.host  # type: ignore[attr-defined]
    there.marked = True  # an attribute that marks the change
    handle = engine.submit(PROMPT.to("cuda"), **options)
    engine.run()
    assert handle.tokens == new_tokens(build("llama", seed=1), PROMPT, **options)


def test_a_model_that_cannot_be_captured_says_so_and_runs(device: Simulation) -> None:
    model = build("llama")
    there = on_cuda(copy.deepcopy(model))
    there.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.warns(LookaheadWarning, match="without fixed shapes or CUDA graphs: its LlamaDecoderLayer has hooks"):
        engine = Engine(there, EIGHT, max_rows=2)
    handle = engine.submit(PROMPT.to("cuda"), **{**OPTIONS, **GREEDY})
    engine.run()
    assert handle.tokens == new_tokens(model, PROMPT, **GREEDY)
    assert handle.statistics.engine == "dynamic"
    assert pool_of(engine), "its rows share a pass all the same"


def test_staged_arrays_arrive_and_are_aligned(device: Simulation) -> None:
    staged = Staged(torch.device("cuda:0"), [(1,), (3, 2), (5,)])
    for number, array in enumerate(staged.here):
        array[:] = number + 1
    device.take()
    staged.send()
    assert [event.kind for event in device.take()] == [PINNED]
    assert [part.tolist() for part in staged.there] == [[1], [[2, 2]] * 3, [3] * 5]
    first = staged.there[0].data_ptr()
    assert all((part.data_ptr() - first) % 16 == 0 for part in staged.there)


@pytest.mark.exact
def test_texts_that_are_evicted_make_room(device: Simulation) -> None:
    """Even texts that ended with the last step are evicted, so no row exceeds the memory."""
    model = build("llama")
    there = shared_on_cuda(model)
    size = token_bytes(model)
    engine = Engine(there, EIGHT, max_rows=2, kv_bytes=165 * size)
    capacity = pool_of(engine).capacity
    options = {**OPTIONS, **GREEDY, "max_new_tokens": 60}
    first, second = (engine.submit(ids.to("cuda"), **options) for ids in (PROMPT, PROMPT + 7))
    engine.run()
    assert first.tokens == new_tokens(model, PROMPT, **options)
    assert second.tokens == new_tokens(model, PROMPT + 7, **options)
    longer, options = torch.cat([PROMPT, torch.tensor([first.tokens[:40]])], dim=1), {**options, "max_new_tokens": 20}
    third = engine.submit(longer.to("cuda"), **options)
    engine.run()
    assert third.tokens == new_tokens(model, longer, **options)
    assert third.statistics.reused_tokens > 50
    assert pool_of(engine).capacity == capacity


@pytest.mark.parametrize("name", quickly(["llama", "gemma3"], ["llama"]))
@pytest.mark.parametrize(("config", "hooked"), [(EIGHT, False), (UNCAPTURED, False), (UNCAPTURED, True)])
def test_norms_compute_sums_and_rotary_embeddings_write_to_the_cache(
    name: str, config: LookaheadConfig, hooked: bool, device: Simulation
) -> None:
    """In float16, with the CPU's text. A hook would see late sums, so a model with one has none."""
    model = in_type(name, torch.float16)
    prompt = PROMPT[:, :9]
    there = on_cuda(copy.deepcopy(model))
    if hooked:
        there.model.norm.register_forward_hook(lambda *_: None)
    engine = Engine(there, config, max_rows=2)
    device.take()
    handle = engine.submit(prompt.to("cuda"), **{**OPTIONS, **GREEDY})
    engine.run()
    launched = [event.what for event in device.take()]
    sums, turns = map(launched.count, ("norm with a sum", "rotary with a cache"))
    assert handle.tokens == new_tokens(model, prompt, **GREEDY)
    assert (turns > 0) == (config is UNCAPTURED)  # replays run no Python
    assert sums == (0 if hooked else 2 * turns)
