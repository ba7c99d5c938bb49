"""The probes: what their rows hold, and that a run goes on where it stopped."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_zoo import VOCAB_SIZE, build
from word_model import save_word_tokenizer

command, probe = (importlib.import_module(name) for name in ("command", "probe"))
engine = importlib.import_module("engine")

pytestmark = pytest.mark.usefixtures("compiled_loops")

Measure = Callable[..., int]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """The command sets threads, random numbers and what transformers says; other tests want them as they were."""
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    verbosity = command.transformers.utils.logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)
    command.transformers.utils.logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of as many words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("llama", seed=0).save_pretrained(folder)
    save_word_tokenizer(folder, [f"w{number}" for number in range(VOCAB_SIZE)])
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": str(start), "prompt": " ".join(f"w{start + i % 3}" for i in range(8))} for start in (1, 4)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Run a probe; returns the exit status."""
    return lambda name, *more: int(command.main([name, "--output", str(tmp_path / "rows.jsonl"), *map(str, more)]))


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Let so many units be measured, then act as if Ctrl-C were pressed."""
    left = units
    whole = engine.probe

    def interrupted(options: Any) -> Any:
        planned = whole(options)

        def measured(unit: Any) -> Any:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return unit.measure()

        units = [probe.Unit(unit.name, lambda unit=unit: measured(unit)) for unit in planned.units]
        return probe.Probe(units, planned.header)

    monkeypatch.setattr(engine, "probe", interrupted)


# the command


@pytest.fixture
def steps(measure: Measure, model_folder: Path) -> Callable[..., int]:
    """The engine probe on the tiny model."""
    arguments = ["--model", model_folder, "--dtype", "float32", "--repeats", 1, "--nodes", 4, "--variants", "default"]
    return lambda *more: measure("engine", *arguments, "--contexts", 8, 12, *more)


def test_rows_are_of_units_below_a_header(steps: Callable[..., int], tmp_path: Path) -> None:
    assert steps() == 0
    header, *rows = rows_in(tmp_path)
    assert (header["kind"], header["benchmark"], header["model"]["name"]) == ("header", "engine", "tiny")
    assert header["options"]["model"] == "tiny"
    assert str(tmp_path) not in (tmp_path / "rows.jsonl").read_text(), "no path of this machine may be in the rows"
    assert list(dict.fromkeys(row["unit"] for row in rows)) == ["context 8", "context 12"]
    of_steps = [(row["context"], row["method"], row["nodes"]) for row in rows if row["kind"] == "step"]
    beside = [(name, 1) for name in ("transformers", "memory limit")]
    assert of_steps == [(context, *one) for context in (8, 12) for one in [*beside, ("default", 1), ("default", 4)]]
    assert all(row["seconds"] > 0 for row in rows)


def test_an_interrupted_run_goes_on(
    steps: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        assert steps() == 130
    assert "the same command goes on" in " ".join(capsys.readouterr().err.split())
    early = rows_in(tmp_path)
    assert {row["unit"] for row in early} == {"header", "context 8"}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"unit": "context 12", "kind": "st')  # a crash in the middle of a line
    assert steps() == 0
    whole = rows_in(tmp_path)
    assert whole[: len(early)] == early
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)
        assert steps() == 0, "nothing is measured twice"
        assert rows_in(tmp_path) == whole
        assert steps("--restart") == 130
    assert [row["kind"] for row in rows_in(tmp_path)] == ["header"]


def test_rows_of_another_model_are_kept_apart(
    steps: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps() == 0
    before = rows_in(tmp_path)
    assert steps("--dtype", "bfloat16") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "another model (dtype: 'float32' then, 'bfloat16' now)" in message
    assert "--restart" in message
    assert rows_in(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine", "--nodes", "0"], "whole number of at least 1"),
        (["engine", "--variants", "none"], "--variants none"),
        (["nothing"], "invalid choice"),
    ],
)
def test_what_is_refused(
    measure: Measure, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, tmp_path: Path
) -> None:
    try:
        status = measure(*arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "rows.jsonl").exists()


# the probes


def test_plain_steps_leave_the_cache_as_it_was(model_folder: Path) -> None:
    model = probe.load_model(str(model_folder), "float32").model
    with torch.no_grad():
        plain = engine.PlainSteps(model, [1, 2, 3, 4, 5])
        plain.forward()
        plain.undo()
        assert plain._cache.get_seq_length() == 4


def test_random_model_has_half_a_billion_weights() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**probe.RANDOM_CONFIG))
    assert 450e6 < sum(parameter.numel() for parameter in model.parameters()) < 500e6


def test_forced_texts_are_written_by_each_method(measure: Measure, tmp_path: Path) -> None:
    edit = {
        "id": 1,
        "instruction": "Add one.",
        "input": "def f(x):\n    return x",
        "output": "def f(x):\n    return x + 1",
    }
    step = {"id": 2, "prompt": "bash-$ ls tests\n", "output": "ls tests/unit"}
    for name, row in (("edits", edit), ("traces", step)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = ["--edits", tmp_path / "edits.jsonl", "--traces", tmp_path / "traces.jsonl"]
    assert measure("forced_text", *files, "--layers", 1, "--hidden-size", 32, "--max-new-tokens", 12) == 0
    header, *rows = rows_in(tmp_path)
    assert [row["method"] for row in rows if row["task"] == "edits"] == list(header["methods"])
    assert all(row["equal"] and row["steps"] <= row["tokens"] for row in rows)
    assert measure("forced_text", *files, "--layers", 1, "--hidden-size", 32, "--methods", "guessing", "--restart") == 2


def test_the_serving_probe_counts_each_method_at_each_load(
    measure: Measure, model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    methods = ["drafts", "plain", "4 drafts", "batches", "drafted batches"]
    arguments = ["--model", model_folder, "--prompts", prompts, "--loads", 1, 2, "--repeats", 1, "--max-new-tokens", 6]
    assert measure("serving", *arguments, "--methods", *methods) == 0
    rows = [row for row in rows_in(tmp_path) if "repeat" in row]
    assert [(row["load"], row["method"]) for row in rows] == [(load, name) for load in (1, 2) for name in methods]
    assert all(row["tokens"] == 12 and row["differ"] == 0 and row["over_plain"] > 0 for row in rows)
    assert all(row["nodes_per_row"] >= 1 for row in rows if "batches" not in row["method"])


def test_the_first_half_hour_on_a_gpu_runs_without_one(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("edits", "traces"):
        row = {"id": name, "prompt": "def first(x):\n    return x\n", "output": "def first(x):\n    return x\n"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        files += [f"--{name}", tmp_path / f"{name}.jsonl"]
    small = ["--device", "cpu", "--tiny", 1, "--contexts", 64, "--repeats", 1, "--new-tokens", 8, *files]
    assert measure("gpu", *small, "--parts", "prices", "speed") == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"header", "step", "prepared", "transformers", "forced", "engine"}
    assert all(row["equal"] for row in rows if row["kind"] == "forced")
    if not torch.cuda.is_available():
        assert measure("gpu", "--parts", "right") == 2
        assert "finds no CUDA device" in capsys.readouterr().err


def test_a_unit_that_fails_does_not_end_the_half_hour() -> None:
    def work() -> Any:
        yield {"kind": "step"}
        raise RuntimeError("out of memory")

    rows = list(importlib.import_module("gpu").guarded(work))
    assert [row["kind"] for row in rows] == ["step", "failed"]
    assert "out of memory" in rows[1]["error"]
