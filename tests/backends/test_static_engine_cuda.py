"""The static engine on a GPU: captured graphs, the kernel, and the state after a failed capture."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig
from lookahead.backends.transformers.attention import TREE_ATTENTION
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.fixed_passes import FixedPasses, recorder_for
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.runner import ModelRunner
from model_zoo import ARCHITECTURES, build
from test_static_engine import (
    BY_LENGTH,
    NAMES,
    PROMPT,
    STATIC,
    addresses,
    assert_same,
    inputs_of,
    logits_of_steps,
    static_runner,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
WITH_KERNEL = ["llama", "mistral_sliding", "qwen2_mixed_sliding", "gemma3", "llama4_chunked"]
WITH_EXPERTS = ["deepseek_v3", "mixtral", "qwen3_moe"]
"""torch computes grouped products without the host only in bfloat16."""


def is_static(engine: PreTrainedModel) -> bool:
    """Return whether the last call with this engine ran static steps."""
    return state_of(engine).trials.fixed_passes is not None


def on_gpu(name: str) -> PreTrainedModel:
    return copy.deepcopy(build(name, attention=ARCHITECTURES[name].attention[0])).to("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_texts_equal_generate(name: str) -> None:
    model, prompt = on_gpu(name), PROMPT.cuda()
    few = GREEDY | ({"max_new_tokens": 20} if name in BY_LENGTH else {})  # plain decoding is right only for short texts
    expected = model.generate(prompt, **few)
    for config in (LookaheadConfig(engine="dynamic"), STATIC, STATIC):  # the third replays the second's graphs
        model(torch.zeros((1, 1), dtype=torch.long, device="cuda"), use_cache=False)  # dynamic RoPE forgets
        assert torch.equal(lookahead.generate(model, prompt, lookahead_config=config, **few), expected), config
    engine = engine_model(model)
    assert (engine.config._attn_implementation == TREE_ATTENTION) >= (name in WITH_KERNEL)
    print(name, engine.config._attn_implementation, "static" if is_static(engine) else "dynamic")
    assert is_static(engine) <= (name not in BY_LENGTH)
    assert is_static(engine) >= (name in WITH_KERNEL)


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_replays_are_the_dynamic_steps(name: str) -> None:
    """Includes garbage in unused columns of the cache, which the kernel must not read."""
    model = engine_model(on_gpu(name))
    for batch in (1, 2):
        passes: FixedPasses | None = None
        seen: list[int] = []
        expected = [logits.cpu() for logits in logits_of_steps(ModelRunner(model, batch), batch=batch)]
        for _ in range(2):
            with torch.no_grad():
                runner = static_runner(model, batch, passes=passes)
            if passes is None:
                for buffer in runner.passes.cache.buffers:
                    buffer.fill_(float("nan"))
            got = logits_of_steps(runner, batch=batch)
            assert_same([logits.cpu() for logits in got], expected)
            assert not seen or addresses(passes) == seen
            passes = runner.end_call()
            seen = addresses(passes)
        assert passes.recorded.count == len(inputs_of(passes))


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_texts_of_an_engine_equal_generate(name: str) -> None:
    """Rows join and leave; all sizes are captured at the start."""
    model = on_gpu(name)
    engine = Engine(model, LookaheadConfig(step_budget=8), max_rows=3)
    captured = engine.statistics.graphs.count
    assert captured > 0
    prompts = [PROMPT[:1, : PROMPT.shape[1] - row].cuda() for row in range(6)]
    handles = []
    for row, prompt in enumerate(prompts):
        handles.append(engine.submit(prompt, max_new_tokens=10 + 5 * row, do_sample=False))
        engine.step()
    engine.run()
    for row, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
        assert torch.equal(handle.result(), model.generate(prompt, max_new_tokens=10 + 5 * row, do_sample=False))
        assert handle.statistics.engine == "static"
    assert engine.statistics.graphs.count == captured


def test_steps_take_no_memory() -> None:
    model, prompt = on_gpu("llama"), PROMPT.cuda()
    allocated: list[int] = []

    def note(_: object) -> None:
        allocated.append(torch.cuda.memory_allocated())

    for _ in range(2):
        allocated.clear()
        lookahead.generate(model, prompt, lookahead_config=STATIC, on_step=note, **GREEDY)
    # Only the text grows, by a token at a time.
    assert max(allocated) - min(allocated) < 64 * 1024


def test_garbage_with_graphs_does_not_break_a_capture_off() -> None:
    record = recorder_for(torch.device("cuda"))
    assert record is not None
    there, thresholds = torch.ones(3, device="cuda"), gc.get_threshold()
    try:
        for _ in range(8):
            gc.set_threshold(1)  # collect new objects at once
            cycle: list[Any] = [record(lambda: (there + 1, [[] for _ in range(100)] and there * 2))]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("failing", [False, True])
def test_sampling_works_after_a_capture(failing: bool) -> None:
    """Afterwards sampling equals transformers with the same seed, even if the check pass could not be captured."""
    model, prompt = on_gpu("llama"), PROMPT.cuda()
    if failing:
        plain = model.model.norm.forward.__func__

        class Waiting(type(model.model.norm)):  # type: ignore[misc]
            def forward(self, states: torch.Tensor) -> torch.Tensor:
                assert float(states.abs().amax()) >= 0  # waits for the device
                result: torch.Tensor = plain(self, states)
                return result

        model.model.norm.__class__ = Waiting
    for seed in range(3):
        torch.manual_seed(seed)
        expected = model.generate(prompt, max_new_tokens=30, do_sample=True)
        torch.manual_seed(seed)
        got = lookahead.generate(model, prompt, lookahead_config=STATIC, max_new_tokens=30, do_sample=True)
        assert torch.equal(got, expected)
    assert is_static(engine_model(model)) != failing


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float16), *((name, torch.bfloat16) for name in ("llama", *WITH_EXPERTS))]
)
def test_low_precision_stays_static(name: str, dtype: torch.dtype) -> None:
    model = on_gpu(name).to(dtype)
    lookahead.generate(model, PROMPT.cuda(), lookahead_config=STATIC, **GREEDY)
    assert is_static(engine_model(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "gpt_neox", "qwen3"])
def test_fused_modules_give_the_bits_of_the_model(name: str, dtype: torch.dtype) -> None:
    model = on_gpu(name).to(dtype)
    fused = engine_model(model)
    kinds = {type(part) for part in fused.modules()} - {type(part) for part in model.modules()}
    assert len(kinds) == (1 if name == "gpt_neox" or dtype == torch.float32 else 2)
    with torch.no_grad():
        assert torch.equal(fused(PROMPT.cuda()).logits, model(PROMPT.cuda()).logits)
