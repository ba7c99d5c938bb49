"""The library on the simulated CUDA device: texts, and the host's waits in a step.

The simulation patches torch, so `test_simulated_cuda.py` runs this file in a separate process:
`python -m pytest tests/backends/apart/simulated_cuda_cases.py`.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig, LookaheadWarning
from lookahead.backends.transformers import engine_model as engine_models
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.fixed_passes import PAYS_FROM, pass_sizes, recorder_for
from lookahead.backends.transformers.model_state import state_of
from lookahead.bench.tuning import measure
from lookahead.core.statistics import StepRecord
from model_zoo import ARCHITECTURES, build
from quick import quickly
from simulated_cuda import (
    CAPTURE,
    OPERATION,
    PAGEABLE,
    PINNED,
    REPLAY,
    WAIT,
    CudaTensor,
    Event,
    Graph,
    Simulation,
    on_cuda,
    shared_on_cuda,
    without_simulation,
)
from tiny.families import build as build_family
from tiny.images import image_prompt
from tiny.variant import Variant

PROMPT = torch.tensor([[5, 11, 7, 3, 13, 2, 17, 5, 11, 7, 3, 19, 5, 11, 7]])
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
EAGER = LookaheadConfig(step_budget=16, engine="dynamic", memory="request")
GRAPHS = LookaheadConfig(step_budget=16, engine="static", memory="request")
PLAIN = LookaheadConfig(preset="autoregressive", engine="dynamic")
AUTO = LookaheadConfig(step_budget=16, memory="request")


def to_host(tensor: Any) -> torch.Tensor:
    host: torch.Tensor = tensor.host if isinstance(tensor, CudaTensor) else tensor
    return host


def generated(
    model: PreTrainedModel, inputs: dict[str, Any], config: LookaheadConfig, **arguments: Any
) -> torch.Tensor:
    """Return the library's text on the simulated device, as a CPU tensor."""
    there = {name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    torch.manual_seed(1)
    return to_host(lookahead.generate(model, **there, lookahead_config=config, **arguments))


def expected(model: PreTrainedModel, inputs: dict[str, Any], **arguments: Any) -> torch.Tensor:
    """Return the text of `model.generate` on the CPU."""
    torch.manual_seed(1)
    with without_simulation():
        ids: torch.Tensor = model.generate(**inputs, **arguments)
    return ids


# The simulation detects errors.


def test_mixed_devices_are_an_error(device: Simulation) -> None:
    here, there, elsewhere = torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
    assert str(there.device) == "cuda:0"
    for first, second in ((here, there), (there, here), (there, elsewhere)):
        with pytest.raises(RuntimeError, match="on one device"):
            first + second
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    assert (there * torch.tensor(2.0) + 1).tolist() == [3, 3]


def test_waits_and_copies_are_logged(device: Simulation) -> None:
    tensor = torch.tensor([3, 4], device="cuda")
    device.take()
    assert int(tensor[1]) == 4
    assert tensor[tensor > 3].tolist() == [4]
    torch.zeros(2).to("cuda", non_blocking=True)
    torch.zeros(2, pin_memory=True).to("cuda", non_blocking=True)
    kinds = [event.kind for event in device.take()]
    assert kinds == [WAIT, OPERATION, WAIT, OPERATION, WAIT, PAGEABLE, PINNED]


def test_replays_run_no_python_on_the_same_memory(device: Simulation) -> None:
    tensor, times, graph = torch.zeros(1, device="cuda"), 2, Graph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = tensor * times
        other = Thread(target=lambda: tensor.tolist())  # another thread does not capture
        other.start()
        other.join()
    times = 3
    for value in (5.0, 7.0):
        tensor.fill_(value)
        graph.replay()
        assert result.item() == 2 * value
    with (
        pytest.raises(RuntimeError, match="when stream is capturing"),
        device.capture(Graph(), None, None, "thread_local"),
    ):
        result.item()


def test_work_that_waits_is_refused_before_its_capture(device: Simulation) -> None:
    there = torch.ones(3, device="cuda:0")
    record = recorder_for(torch.device("cuda:0"))
    assert record is not None
    waits: list[Callable[[], object]] = [
        lambda: int(there[0]),
        lambda: there[there > 0],
        lambda: there.cpu(),
        lambda: there.nonzero(),
        lambda: torch.zeros(3).to("cuda:0"),
    ]
    for wait in waits:
        with pytest.raises(RuntimeError, match="waits for the device"):
            record(lambda wait=wait: (there + 1, wait()))  # type: ignore[misc]
    other: list[list[float]] = []

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        thread = Thread(target=lambda: other.append(there.tolist()))  # waits of other threads do not count
        thread.start()
        thread.join()
        return there + 1, there * 2

    record(work)
    assert other == [[1.0] * 3] * 3


def test_no_garbage_is_collected_during_a_capture(device: Simulation) -> None:
    there, collects = torch.ones(3, device="cuda:0"), list[bool]()
    record = recorder_for(torch.device("cuda:0"))
    assert record is not None

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        collects.append(gc.isenabled())
        return there + 1, there * 2

    record(work)
    assert collects == [True, True, False]
    assert gc.isenabled()


def test_a_buffer_overwritten_while_it_is_copied_is_an_error(device: Simulation) -> None:
    buffer = torch.zeros(2, pin_memory=True)
    copied = buffer.to("cuda", non_blocking=True)
    buffer += 1
    with pytest.raises(RuntimeError, match="overwrote a pinned buffer"):
        copied.tolist()
    device._under_way.clear()


# Costs of a step for the host.


def of_steps(steps: list[tuple[int, list[Event]]], nodes: range) -> tuple[float, float]:
    """Return the average waits, and operations outside of the model, in steps with this number of nodes."""
    selected = [events for count, events in steps if count in nodes]
    assert selected, [count for count, _ in steps]
    waits = sum(event.kind == WAIT for events in selected for event in events)
    operations = sum(event.kind == OPERATION and not event.in_model for events in selected for event in events)
    assert not any(event.kind == PAGEABLE for events in selected for event in events)
    return waits / len(selected), operations / len(selected)


MOST_OF_A_STEP = {
    "plain": (PLAIN, GREEDY, 1, 1, 2),
    "tree": (EAGER, GREEDY, 1, 1, 26),
    "sampled": (EAGER, SAMPLED, 1, 1, 44),
    "sampled by the text": (EAGER, {**SAMPLED, "repetition_penalty": 1.1}, 1, 5, 90),
    "batch": (EAGER, GREEDY, 2, 1, 57),
    "sampled batch": (EAGER, SAMPLED, 2, 1, 88),
    "auto": (AUTO, GREEDY, 1, 1, 1.4),
    "graphs, plain": (LookaheadConfig(preset="autoregressive", engine="static"), GREEDY, 1, 1, 0),
    "graphs, tree": (GRAPHS, GREEDY, 1, 1, 1.4),
    "graphs, sampled": (GRAPHS, SAMPLED, 1, 1, 30),
    "graphs, batch": (GRAPHS, GREEDY, 2, 1, 2),
}
"""Configuration, options, rows, and largest averages of waits and operations in a step. The bounds must not rise."""


@pytest.mark.parametrize("kind", quickly(MOST_OF_A_STEP, ["tree", "batch", "graphs, tree", "graphs, sampled"]))
def test_steps_wait_for_the_device_as_often_as_they_must(
    kind: str, device: Simulation, demo_model: PreTrainedModel, there: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    config, how, rows, most_waits, most_operations = MOST_OF_A_STEP[kind]
    # Texts that overlap, so that drafts are often right.
    inputs = {"input_ids": torch.cat([demo_prompt[:, row : row + 150] for row in range(rows)])}
    options = {"max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0, **how}
    steps: list[tuple[int, list[Event]]] = []

    def note(record: StepRecord) -> None:
        steps.append((record.nodes, device.take()))

    if config.engine != "dynamic":  # captures
        generated(there, inputs, config, **options)
    device.take()
    got = generated(there, inputs, config, on_step=note, **options)
    assert torch.equal(got, expected(demo_model, inputs, **options))
    steps = steps[2 * rows :]
    if rows > 1:  # `note` is called for each row
        steps = [(nodes, events) for nodes, events in steps if events]
    drafted = range(1, 2) if config.preset == "autoregressive" else range(2, 100)
    waits, operations = of_steps(steps, drafted)
    print(f"{kind}: {waits:.2f} waits, {operations:.1f} operations")
    assert waits <= most_waits
    assert operations <= most_operations
    kinds = {event.kind for _, events in steps for event in events}
    assert (REPLAY in kinds) == (config.engine != "dynamic")
    assert CAPTURE not in kinds


def test_a_short_text_is_not_worth_a_capture(
    device: Simulation, demo_model: PreTrainedModel, demo_prompt: torch.Tensor
) -> None:
    model, inputs = on_cuda(copy.deepcopy(demo_model)), {"input_ids": demo_prompt}
    for tokens, captures in ((PAYS_FROM - 2, False), (2 * PAYS_FROM, True)):
        device.take()
        options = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0, **GREEDY}
        assert torch.equal(generated(model, inputs, AUTO, **options), expected(demo_model, inputs, **options))
        engine = engine_model(model)
        passes = state_of(engine).trials.fixed_passes
        assert passes is not None
        assert (passes.recorded.count > 0) == captures


def test_dense_masks_are_attended_to_without_plans_for_shapes(
    device: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = build("llama"), set[tuple[bool, bool]]()
    there = on_cuda(copy.deepcopy(model))

    class Noting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                seen.add((kwargs.get("attn_mask") is not None, torch.backends.cuda.cudnn_sdp_enabled()))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(engine_models, "find_spec", lambda name: None)  # Triton is not installed
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with Noting():
        got = generated(there, {"input_ids": PROMPT}, EAGER, max_new_tokens=20, **GREEDY)
    assert torch.equal(got, expected(model, {"input_ids": PROMPT}, max_new_tokens=20, **GREEDY))
    assert (True, False) in seen
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_pace_knows_the_passes_that_are_captured(device: Simulation) -> None:
    """Pace fills captured sizes (`tests/core/test_pace.py`), and in an engine never exceeds the largest one."""
    model = on_cuda(copy.deepcopy(build("llama")))
    generated(model, {"input_ids": PROMPT}, LookaheadConfig(), max_new_tokens=20, **GREEDY)
    known = [tuple(costs.captured) for costs in state_of(model).costs.values()]
    assert known == [pass_sizes(LookaheadConfig().max_nodes)]
    engine = lookahead.Engine(model, max_rows=2)
    handle = engine.submit(PROMPT, max_new_tokens=20, do_sample=False)
    engine.run()
    assert 1 < max(handle.statistics.nodes_per_step) <= known[0][-1]


def test_tune_times_graphs_and_no_capture(device: Simulation, there: PreTrainedModel) -> None:
    captured: list[bool] = []

    def note(what: str) -> None:
        captured.append(any(event.kind == CAPTURE for event in device.take()))

    measured = measure(there, node_counts=(1, 8), contexts=(64,), repeats=2, progress=note)
    assert [point.nodes for point in measured] == [1, 8]
    assert any(event.kind == REPLAY for event in device.take())
    # Each call comes before one of two timings, and sees the events of the timing before.
    assert any(captured[:3])
    assert not any(captured[3:]), "only the round that does not count captures"


def test_a_model_that_cannot_be_captured_says_so_and_runs(device: Simulation) -> None:
    model, inputs = build("llama"), {"input_ids": PROMPT}
    there = on_cuda(copy.deepcopy(model))
    there.model.layers[0].register_forward_hook(lambda *_: None)
    options = {"max_new_tokens": 16, "return_dict_in_generate": True, **GREEDY}
    with pytest.warns(LookaheadWarning, match="without fixed shapes or CUDA graphs: its LlamaDecoderLayer has hooks"):
        output = lookahead.generate(there, PROMPT.to("cuda:0"), lookahead_config=AUTO, **options)
    assert output.statistics.engine == "dynamic"
    assert torch.equal(to_host(output.sequences), expected(model, inputs, max_new_tokens=16, **GREEDY))


# Texts.


def test_texts_with_this_default_device_equal_the_cpus(device: Simulation) -> None:
    model, inputs = build("qwen2"), {"input_ids": PROMPT}
    there = shared_on_cuda(model)
    texts = [expected(model, inputs, max_new_tokens=24, **options) for options in (GREEDY, SAMPLED)]
    with torch.device("cuda:0"):
        for config in (EAGER, GRAPHS):
            for options, text in zip((GREEDY, SAMPLED), texts, strict=True):
                assert torch.equal(generated(there, inputs, config, max_new_tokens=24, **options), text)
        handle = Engine(there, AUTO).submit(PROMPT[0].tolist(), max_new_tokens=24, **GREEDY)
        assert torch.equal(to_host(handle.result()), texts[0])


@pytest.mark.parametrize("name", quickly(ARCHITECTURES, ["gemma3"]))
def test_texts_of_all_families_equal_the_cpus(name: str, device: Simulation) -> None:
    model, inputs = build(name, attention=ARCHITECTURES[name].attention[0]), {"input_ids": PROMPT}
    there = shared_on_cuda(model)
    for options in (GREEDY, SAMPLED):  # the second call only replays graphs
        for config in (EAGER, GRAPHS):
            got = generated(there, inputs, config, max_new_tokens=24, **options)
            assert torch.equal(got, expected(model, inputs, max_new_tokens=24, **options)), config
    print(name, "graphs" if any(event.kind == REPLAY for event in device.take()) else "eager")


@pytest.mark.parametrize("family", ["qwen3_next", *quickly(["lfm2", "granitemoehybrid"], [])])
def test_texts_of_chains_equal_the_cpus(family: str, device: Simulation) -> None:
    model = build_family(family, Variant(), "sdpa")
    there = shared_on_cuda(model)
    for options in (GREEDY, SAMPLED):
        got = generated(there, {"input_ids": PROMPT}, LookaheadConfig(), max_new_tokens=16, **options)
        assert torch.equal(got, expected(model, {"input_ids": PROMPT}, max_new_tokens=16, **options))


@pytest.mark.parametrize("family", quickly(["gemma3", "qwen2_5_vl/multimodal", "llava/multimodal"], ["gemma3"]))
def test_texts_after_images_equal_the_cpus(family: str, device: Simulation) -> None:
    model = build_family(family, Variant(window=12), "sdpa")
    inputs = image_prompt(model, [PROMPT[0].tolist()], 0)
    there = shared_on_cuda(model)
    for config in (EAGER, GRAPHS):
        got = generated(there, inputs, config, max_new_tokens=16, **GREEDY)
        assert torch.equal(got, expected(model, inputs, max_new_tokens=16, **GREEDY))


class _Hook(AlignDevicesHook):
    """A hook that moves only inputs; weights are on the device already."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` on two devices, with the hooks of a `device_map`."""

    def device_of(name: str) -> str:
        first = name.startswith(("model.embed_tokens", "model.rotary_emb", "model.layers.0."))
        return "cuda:0" if first else "cuda:1"

    model = on_cuda(model, device_of)
    skipped = model._skip_keys_device_placement
    for name, module in model.named_modules():
        if name in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head") or (
            name.startswith("model.layers.") and name.count(".") == 2
        ):
            hook = _Hook(execution_device=torch.device(device_of(f"{name}.")), skip_keys=skipped)
            add_hook_to_module(module, hook)
    add_hook_to_module(model, _Hook(execution_device=torch.device("cuda:0"), io_same_device=True, skip_keys=skipped))
    model.hf_device_map = {}
    return model


def test_texts_of_a_model_on_two_devices_equal_the_cpus(device: Simulation) -> None:
    model, inputs = build("llama"), {"input_ids": PROMPT}
    there = spread(copy.deepcopy(model))
    trees = LookaheadConfig(preset="paper")
    for config, options in ((EAGER, SAMPLED), (GRAPHS, GREEDY), (trees, GREEDY), (trees, SAMPLED)):
        got = generated(there, inputs, config, max_new_tokens=24, **options)
        assert torch.equal(got, expected(model, inputs, max_new_tokens=24, **options)), config
    engine = Engine(there, EAGER, max_rows=2)
    handles = [engine.submit(PROMPT.to("cuda"), max_new_tokens=16, **GREEDY) for _ in range(2)]
    engine.run()
    text = expected(model, inputs, max_new_tokens=16, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    assert [handle.tokens for handle in handles] == [text, text]
