"""`preset="auto"` through `generate`: memories between calls, in the process and in files."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig, LookaheadOutput
from lookahead.backends.transformers.findings import describe_setting, model_identity, store_costs
from lookahead.core.step_costs import StepCosts
from lookahead.drafting.memory_file import load_memory
from model_zoo import build
from ngram_access import lookup

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
OPTIONS = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


def run(model: PreTrainedModel, **fields: object) -> LookaheadOutput:
    output = lookahead.generate(model, PROMPT, lookahead_config=LookaheadConfig(**fields), **OPTIONS)
    assert torch.equal(output.sequences, model.generate(PROMPT, max_new_tokens=48, do_sample=False))
    return output


def test_auto_is_the_default_and_sizes_imply_the_preset() -> None:
    assert LookaheadConfig().preset == "auto"
    assert LookaheadConfig(step_budget=16).preset == "auto"
    assert LookaheadConfig(window_size=15).preset == "paper"
    assert LookaheadConfig(pool_from_output=False).preset == "paper"
    assert LookaheadConfig(block_size=16).preset == "jacobi"
    paper = LookaheadConfig(preset="paper")
    assert (paper.window_size, paper.ngram_size, paper.guess_set_size) == (15, 5, 15)
    assert paper == LookaheadConfig(window_size=15)


@pytest.mark.parametrize("budget", [1, 2, 16, 64])
def test_a_budget_is_never_exceeded_and_filled_where_it_can(model: PreTrainedModel, budget: int) -> None:
    nodes = run(model, step_budget=budget).statistics.nodes_per_step
    assert max(nodes) <= budget
    assert budget in nodes[-3:]


def test_a_memory_of_the_process_saves_steps_in_the_next_call(model: PreTrainedModel) -> None:
    first, second = (run(model, step_budget=16, memory="process").statistics for _ in range(2))
    assert second.steps < first.steps
    assert second.sources[0]["entries"][0] >= first.sources[0]["entries"][0] > 0
    assert run(model, step_budget=16, memory="request").statistics.steps == first.steps  # its memory starts empty
    other = copy.deepcopy(model)
    assert run(other, step_budget=16, memory="process").statistics.steps == first.steps


@pytest.mark.parametrize("attached", [False, True])
def test_calls_without_a_configuration_share_a_memory(model: PreTrainedModel, attached: bool) -> None:
    expected = model.generate(PROMPT, max_new_tokens=48, do_sample=False)
    if attached:
        lookahead.attach(model)
    generate = model.generate if attached else partial(lookahead.generate, model)
    entries = []
    for _ in range(2):
        output = generate(PROMPT, **OPTIONS)
        assert torch.equal(output.sequences, expected)
        entries.append(output.statistics.sources[0]["entries"][0])
    fresh = generate(PROMPT, lookahead_config=LookaheadConfig(memory="request"), **OPTIONS)
    both = generate(torch.flip(PROMPT, [1]), **OPTIONS).statistics.sources[0]["entries"][0]
    assert both > entries[1] >= entries[0] > 0
    assert fresh.statistics.sources[0]["entries"][0] < both


def test_a_memory_in_a_file_goes_on_in_another_process(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "memory.npz"
    first = run(model, step_budget=16, memory=path).statistics
    assert path.exists()
    again = copy.deepcopy(model)  # another object, as in another process: only the file connects them
    second = run(again, step_budget=16, memory=path).statistics
    assert second.steps < first.steps
    # A memory from the file gives the same drafts as a memory in the process.
    third = copy.deepcopy(model)
    run(third, step_budget=16, memory="process")
    assert run(third, step_budget=16, memory="process").statistics.steps == second.steps
    assert not [file for file in path.parent.iterdir() if file != path and file.suffix != ".lock"]


def test_two_model_objects_with_one_file_merge_their_memories(model: PreTrainedModel, tmp_path: Path) -> None:
    """Like two processes with one file: both read it before either writes."""
    path, other = tmp_path / "memory.npz", copy.deepcopy(model)
    config = LookaheadConfig(memory=path, step_budget=16)
    texts = [torch.tensor([[5 + row, 7, 11, 13 + row]]) for row in range(4)]
    for row, text in enumerate(texts):
        lookahead.generate((model, other)[row % 2], text, lookahead_config=config, max_new_tokens=4, do_sample=False)
    merged = load_memory(path, model_identity(model))
    assert lookup(merged, torch.cat(texts).flip(1).numpy())[0].all()


def test_a_memory_of_another_model_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "memory.npz"
    run(model, memory=path)
    with pytest.raises(InvalidArgumentError, match=r"memory\.npz"):
        run(copy.deepcopy(build("qwen2")), memory=path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidArgumentError, match=r"memory\.npz"):
        run(copy.deepcopy(model), memory=path)


def test_a_memory_that_cannot_be_written_is_refused_at_once(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "memory.npz", tmp_path):
        with pytest.raises(InvalidArgumentError, match="cannot be written"):
            run(model, memory=path)


def test_a_disk_that_fills_up_costs_no_text(
    model: PreTrainedModel, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    with full_disk(), pytest.warns(lookahead.LookaheadWarning, match=r"memory\.npz.*could not be written"):
        run(model, memory=tmp_path / "memory.npz")


def test_statistics_have_the_sizes_of_memory_and_pool(model: PreTrainedModel) -> None:
    (memory,) = run(model).statistics.sources
    assert sum(memory["entries"]) > 0
    assert memory["bytes"] > 0
    (pool,) = run(model, preset="paper").statistics.sources
    assert pool["entries"] >= pool["keys"] > 0
    assert 0 < pool["hit_rate"] <= 1
    assert run(model, preset="autoregressive").statistics.sources == [{}]


@pytest.mark.parametrize(("factor", "least", "most"), [(100.0, 1, 1), (1.0, 8, 128)])
def test_the_nodes_follow_from_a_stored_cost_curve(
    model: PreTrainedModel, own_findings: Path, factor: float, least: int, most: int
) -> None:
    """Stored curves of `lookahead tune`: steps of several nodes are too expensive, or cost nothing more."""
    curve = StepCosts.fit([(1, 0, 1.0), *((nodes, 0, factor) for nodes in (2, 16, 128))])
    store_costs(describe_setting(model, LookaheadConfig()), curve, {})
    nodes = run(model).statistics.nodes_per_step
    assert least <= max(nodes) <= most


def test_sampled_rows_are_repeated_under_the_same_seed(model: PreTrainedModel) -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts.append(lookahead.generate(model, PROMPT, max_new_tokens=40, do_sample=True, num_return_sequences=4))
    assert torch.equal(*texts)
