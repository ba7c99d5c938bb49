"""`lookahead bench run`: measurements, comparisons, resumed runs, and result files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import lookahead.bench.measuring as measuring
from bench_suite import (
    AUTO,
    ENGINE,
    KEPT,
    LOOKUP,
    MODEL,
    NEW_TOKENS,
    OTHERS,
    PLAIN,
    SAMPLED,
    TASK,
    make_model,
    write_prompts,
)
from lookahead.backends.session import open_session
from lookahead.bench.measuring import MethodRunner, load, noted_passes, steps_of
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec
from lookahead.cli import main
from lookahead.errors import InvalidArgumentError
from word_model import WORDS

pytestmark = pytest.mark.usefixtures("compiled_loops")

Bench = Callable[..., int]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A folder with the model and the prompts."""
    (tmp_path / "tiny").symlink_to(model_folder)
    write_prompts(tmp_path)
    return tmp_path


@pytest.fixture
def bench(folder: Path) -> Bench:
    """Run a benchmark from TOML, with optional further arguments; return the exit code."""

    def run(suite: str, *more: str) -> int:
        (folder / "suite.toml").write_text(suite)
        output = ["--output", str(folder / "results.jsonl"), "--device", "cpu"]
        return main(["bench", "run", str(folder / "suite.toml"), *output, *more])

    return run


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def keys(folder: Path) -> list[tuple[str, str, int]]:
    return [(row["method"], row["prompt"], row["repeat"]) for row in rows_in(folder)]


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


Runs = Callable[[Callable[[MethodRunner, Row], None]], None]


@pytest.fixture
def after_runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Calls a function after each run of a method, with what ran it and its row."""

    def call(function: Callable[[MethodRunner, Row], None]) -> None:
        class Watched(MethodRunner):
            def run(self, *arguments: Any) -> Row:
                row = super().run(*arguments)
                function(self, row)
                return row

        monkeypatch.setattr(measuring, "MethodRunner", Watched)

    return call


def interrupt_after(runs: int) -> Callable[[MethodRunner, Row], None]:
    """Simulate Ctrl-C in the middle of the run that follows `runs` complete ones."""
    done = iter(range(runs))

    def press(*_: object) -> None:
        if next(done, None) is None:
            raise KeyboardInterrupt

    return press


def nothing(*_: object) -> None:
    """Leave the runs as they are."""


# measurements


def test_all_methods_write_the_reference_text_on_all_tasks(
    bench: Bench, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(MODEL + TASK + SAMPLED + PLAIN + ENGINE + AUTO + KEPT + LOOKUP + OTHERS) == 0
    out, err = capsys.readouterr()
    assert "tiny, words" in out
    assert "tiny, drawn" in out
    assert err == ""
    rows = rows_in(folder)
    methods = {row["method"] for row in rows}
    assert methods == {
        "plain",
        "engine",
        "auto",
        "kept",
        "lookup",
        "assisted",
        "jacobi",
        "paper",
        "recycling",
        "matches",
    }
    assert len(rows) == 2 * 2 * len(methods)
    assert [row["method"] for row in rows[:2]] == ["plain", "engine"]
    assert rows[len(methods)]["method"] == "engine", "each prompt begins with another method"
    for row in rows:
        expected = next(
            other["output"]
            for other in rows
            if other["reference"] and (other["task"], other["prompt"]) == (row["task"], row["prompt"])
        )
        drafts_of_transformers = row["method"] in ("lookup", "assisted")
        assert row["exact"] == (row["task"] == "words" or not drafts_of_transformers)
        if row["exact"]:
            assert row["output"] == expected, row["method"]
        assert len(row["output"]) == row["tokens"] == sum(row["accepted_lengths"]) == NEW_TOKENS
        assert len(row["accepted_lengths"]) == len(row["nodes_per_step"]) == row["steps"]
        assert all(
            length <= nodes for length, nodes in zip(row["accepted_lengths"], row["nodes_per_step"], strict=True)
        )
        assert row["S"] == pytest.approx(row["tokens"] / row["steps"], abs=1e-4)
        assert row["cpu_seconds"] >= 0
        assert row["wall_seconds"] > 0
        assert bool(row["seconds"]) == ("lookahead" in row["settings"]["method"])
        assert row["machine"]["threads"] == torch.get_num_threads()
        assert row["versions"]["torch"] == torch.__version__
    assert len({tuple(row["output"]) for row in rows if row["reference"]}) == 4, "the texts are different ones"


def test_steps_of_assisted_generation_are_passes_of_the_model(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompt = torch.tensor([[1, 2, 3, 4, 1, 2]])
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    # The model drafts for itself, so that every drafted token is right.
    assistant = AutoModelForCausalLM.from_pretrained(model_folder)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with noted_passes(model) as passes:
        output = model.generate(prompt, assistant_model=assistant, **arguments)
    tokens = output.shape[1] - prompt.shape[1]
    nodes, lengths = steps_of(passes, prompt.shape[1], tokens)
    assert sum(lengths) == tokens == 20
    assert lengths[:3] == [6, 6, 6]
    assert nodes[:3] == [6, 6, 6]
    count = len(passes)
    model.generate(prompt, **arguments)
    assert len(passes) == count, "it has ended"


def test_prompts_are_cut_to_leave_room_for_new_tokens(bench: Bench, folder: Path) -> None:
    model = (
        '[[models]]\nname = "random"\ntokenizer = "tiny"\nseed = 5\n'
        "random = { hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2, "
        "max_position_embeddings = 16 }\n"
    )
    beginning = TASK.replace('"words"', '"beginning"') + 'max_prompt_tokens = 3\nkeep = "beginning"\n'
    assert bench(model + TASK + beginning + PLAIN + ENGINE, "--limit", "1") == 0
    rows = rows_in(folder)
    assert [row["prompt_tokens"] for row in rows] == [4, 4, 3, 3], "16 positions, 12 of them for what is generated"
    assert {row["settings"]["model"]["seed"] for row in rows} == {5}
    assert {row["tokens"] for row in rows} == {NEW_TOKENS}


def test_models_that_lack_weights_are_refused(folder: Path, model_folder: Path) -> None:
    broken = shutil.copytree(model_folder, folder / "broken")
    weights = load_file(broken / "model.safetensors")
    lacking = min(name for name in weights if "down_proj" in name)
    del weights[lacking]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidArgumentError, match=f"lacks 1 weights \\({re.escape(lacking)}\\)"):
        load(ModelSpec("x", broken), torch.device("cpu"))


def test_random_weights_come_from_the_seed(folder: Path) -> None:
    state = torch.random.get_rng_state()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    first, same, other = (
        load(ModelSpec("x", None, sizes, seed=seed, tokenizer=folder / "tiny"), torch.device("cpu"))
        for seed in (1, 1, 2)
    )
    identities = [model.settings["identity"] for model in (first, same, other)]
    assert identities[0] == identities[1] != identities[2]
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's draws are changed"


def test_objects_share_weights(llama: LlamaForCausalLM) -> None:
    other = open_session(llama).sharing_weights()
    assert other is not llama
    assert other.model.layers[0] is not llama.model.layers[0]
    assert [weight.data_ptr() for weight in other.parameters()] == [weight.data_ptr() for weight in llama.parameters()]


def test_a_method_with_a_memory_begins_every_pass_with_an_empty_one(
    bench: Bench, folder: Path, after_runs: Runs
) -> None:
    assert bench("repeats = 2\n" + MODEL + TASK + SAMPLED + PLAIN + AUTO + KEPT) == 0
    steps: dict[tuple[object, ...], list[int]] = {}
    for row in rows_in(folder):
        if row["method"] == "kept" and row["task"] == "words":
            steps.setdefault((row["prompt"],), []).append(row["steps"])
    assert len(steps) == 2
    assert all(first == second for first, second in steps.values()), "a second pass that knew the first would be faster"


# resumed runs


def test_an_interrupted_run_goes_on_where_it_stopped(
    bench: Bench, folder: Path, after_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = MODEL + TASK + PLAIN + ENGINE + LOOKUP
    after_runs(interrupt_after(4))
    assert bench(suite) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "run the same command again to resume" in err
    assert len(rows_in(folder)) == 4
    after_runs(nothing)
    before = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(before + before[:100])  # ends with a partial line
    assert bench(suite) == 0
    assert (folder / "results.jsonl").read_text().startswith(before)
    assert len(keys(folder)) == len(set(keys(folder))) == 6
    whole = (folder / "results.jsonl").read_text()
    assert bench(suite) == 0
    assert (folder / "results.jsonl").read_text() == whole


def test_a_method_with_a_memory_starts_its_task_again(bench: Bench, folder: Path, after_runs: Runs) -> None:
    suite = MODEL + TASK + PLAIN + KEPT
    after_runs(interrupt_after(3))
    assert bench(suite) == 130
    assert [row["method"] for row in rows_in(folder)] == ["plain", "kept", "kept"]
    after_runs(nothing)
    assert bench(suite) == 0, "it had come to the end of its prompts"
    assert [row["method"] for row in rows_in(folder)] == ["plain", "kept", "kept", "plain"]

    after_runs(interrupt_after(2))
    assert bench(suite, "--restart") == 130
    assert keys(folder) == [("plain", "p/0", 0), ("kept", "p/0", 0)]
    after_runs(nothing)
    assert bench(suite) == 0
    assert sorted(keys(folder)) == sorted(
        [("plain", "p/0", 0), ("kept", "p/0", 0), ("kept", "p/1", 0), ("plain", "p/1", 0)]
    )
    assert keys(folder)[0] == ("plain", "p/0", 0), "what needs no memory stays"

    assert bench(suite, "--restart", "--limit", "1") == 0
    before = rows_in(folder)
    assert bench(suite) == 0
    assert before[0] in rows_in(folder)
    assert before[1] not in rows_in(folder), "a longer task is another walk through the prompts"


def test_rows_measured_in_another_way_are_kept_apart(
    bench: Bench, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(MODEL + TASK + PLAIN + LOOKUP, "--limit", "1") == 0
    before = (folder / "results.jsonl").read_text()
    capsys.readouterr()
    for changed, words in (
        (MODEL + TASK.replace("12", "8") + PLAIN, ["max_new_tokens", "12 then, 8 now"]),
        (MODEL + TASK + PLAIN + LOOKUP.replace("4", "5"), ["'lookup'", "prompt_lookup_num_tokens", "4 then, 5 now"]),
        (MODEL + 'dtype = "bfloat16"\n' + TASK + PLAIN, ["another model", "dtype", "'bfloat16' now"]),
    ):
        assert bench(changed) == 2
        message = refused(capsys)
        assert all(word in message for word in [*words, "--restart", "--output"]), message
        assert (folder / "results.jsonl").read_text() == before
    write_prompts(folder, [{"id": "p/0", "prompt": "w5 w6 w7"}])
    assert bench(MODEL + TASK + PLAIN) == 2
    assert "another task (input" in refused(capsys)
    assert bench(MODEL + TASK.replace("12", "8") + PLAIN, "--restart") == 0
    assert {row["tokens"] for row in rows_in(folder)} == {8}


# whether outputs are identical


def wrong(method: str) -> Callable[[MethodRunner, Row], None]:
    """Change the fourth token of a method's output."""

    def change(runner: MethodRunner, run: Row) -> None:
        if runner.method.name == method:
            run["output"][3] = (run["output"][3] + 1) % len(WORDS)

    return change


@pytest.mark.parametrize("method", ["engine", "lookup"])
def test_another_text_is_found(bench: Bench, after_runs: Runs, capsys: pytest.CaptureFixture[str], method: str) -> None:
    after_runs(wrong(method))
    assert bench(MODEL + TASK + PLAIN + ENGINE + LOOKUP) == 1
    out, err = capsys.readouterr()
    assert "NO, 0 of 2" in out
    for prompt in ("p/0", "p/1"):
        assert f"{method} on {prompt} (tiny, words, pass 1): differs from the reference at new token 3" in err
    assert "2 outputs differ" in err
    after_runs(nothing)
    assert bench(MODEL + TASK + PLAIN + ENGINE + LOOKUP) == 1, "the rows are still in the file"


def test_differences_are_counted_where_rounding_decides(
    bench: Bench, folder: Path, after_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    after_runs(wrong("engine"))
    assert bench("exact = false\n" + MODEL + 'dtype = "bfloat16"\n' + TASK + PLAIN + ENGINE) == 0
    out, err = capsys.readouterr()
    assert "0 of 2" in out
    assert "NO" not in out
    assert err == ""
    assert {row["exact"] for row in rows_in(folder)} == {False}


def test_a_method_that_transformers_refuses_is_named(
    bench: Bench, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(MODEL + TASK + PLAIN + LOOKUP.replace("prompt_lookup_num_tokens", "prompt_look")) == 2
    message = refused(capsys)
    assert "'lookup'" in message
    assert "prompt_look" in message
    assert keys(folder) == [("plain", "p/0", 0)]
