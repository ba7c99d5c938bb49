"""The probes: their rows, and runs that continue after an interruption."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import Case, Counts, generate
from lookahead import LookaheadConfig
from lookahead.errors import UnsupportedArgumentError
from models import load_model
from preloaded import run_program
from scripted import scripted, scripted_model

command, probe = (importlib.import_module(name) for name in ("command", "probe"))

pytestmark = pytest.mark.usefixtures("compiled_loops")

Measure = Callable[..., int]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Restore threads and random numbers, which the command sets."""
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Run a probe; return the exit status."""
    return lambda name, *more: int(command.main([name, "--output", str(tmp_path / "rows.jsonl"), *map(str, more)]))


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


# the command


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A probe `counting` of two units, which records the measured units; Ctrl-C comes before a third."""
    measured: list[str] = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        path: str = probe.option("some/folder", "a file")
        size: int = probe.option(1, "a size")

    def units(options: Any) -> Any:
        def measure(name: str) -> Any:
            if len(measured) == 2:
                raise KeyboardInterrupt
            measured.append(name)
            return [{"kind": "figure", "value": len(measured)}] * 2

        return probe.Probe([probe.Unit(name, partial(measure, name)) for name in "abc"], {"size": options.size})

    module = SimpleNamespace(Options=Options, probe=units, __doc__="Counts.")
    for registry, entry in ((command.PROBES, "a probe of this test"), (sys.modules, module)):
        monkeypatch.setitem(registry, "counting", entry)
    return measured


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(
    measure: Measure, counting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure("counting", "--path", tmp_path / "model") == 130
    assert "run the same command again to resume" in " ".join(capsys.readouterr().err.split())
    header, *rows = early = rows_in(tmp_path)
    assert (header["kind"], header["benchmark"]) == ("header", "counting")
    assert header["options"] == {"path": "model", "size": 1}
    assert str(tmp_path) not in (tmp_path / "rows.jsonl").read_text(), "no path of this machine may be in the rows"
    assert [row["unit"] for row in rows] == ["a", "a", "b", "b"]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"unit": "c", "kind": "fig')  # a crash in the middle of a line
    counting.clear()
    assert measure("counting") == 0
    assert counting == ["c"]
    assert rows_in(tmp_path)[: len(early)] == early
    assert measure("counting") == 0
    assert counting == ["c"]
    assert measure("counting", "--restart") == 130
    assert [row["unit"] for row in rows_in(tmp_path)] == ["header", "a", "a"]


def test_rows_of_other_settings_are_kept_apart(
    measure: Measure, counting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure("counting")
    before = rows_in(tmp_path)
    assert measure("counting", "--size", 2) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "another size (1 then, 2 now)" in message
    assert "--restart" in message
    assert rows_in(tmp_path) == before


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["counting", "--size", "two"], "invalid int value: 'two'"),
        (["gpu", "--parts", "guessing"], "invalid choice: 'guessing'"),
        (["host", "--ways", "guessing"], "invalid choice: 'guessing'"),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused_before_a_file_is_written(
    measure: Measure, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, tmp_path: Path
) -> None:
    try:
        status = measure(*arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "rows.jsonl").exists()


def test_ways_take_turns_and_are_compared_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def way(name: str, tokens: list[int]) -> Any:
        def run(case: Case, number: int) -> Counts:
            calls.append(name)
            if name == "refused":
                raise UnsupportedArgumentError("not here")
            return Counts(tokens, 2, 3, 0.5)

        return run

    ways = {"plain": [1, 2], "same": [1, 2], "other": [1, 3], "refused": []}
    turns = probe.Turns({name: way(name, tokens) for name, tokens in ways.items()})
    refused, *rows = turns.rows(Case("a", [5]))
    assert (refused["method"], refused["reason"]) == ("refused", "not here")
    assert [(row["method"], row["equal"], "error" in row) for row in rows] == [
        ("plain", True, False), ("same", True, False), ("other", False, True),
    ]  # fmt: skip
    assert (rows[2]["first_difference"], rows[2]["steps"], rows[2]["nodes"]) == (1, 2, 3)
    calls.clear()
    assert [row["equal"] for row in turns.rows(Case("b", [5], [1, 3]))] == [False, False, True], "the answer counts"
    assert calls == ["same", "other", "plain"], "each case begins with another way"


def test_the_fastest_of_several_runs_of_a_case_counts() -> None:
    seconds = {"plain": [9.0, 2.0, 3.0], "fast": [9.0, 1.0, 0.5]}  # the first run is a warm-up

    def way(name: str) -> probe.Way:
        return lambda case, turn: Counts([1], 1, 1, seconds[name].pop(0))

    turns = probe.Turns({name: way(name) for name in seconds}, repeats=2)
    assert [row["cpu_seconds"] for row in turns.rows(Case("a", [5]))] == [2.0, 0.5]


def test_another_text_is_an_error_of_each_of_several_runs() -> None:
    texts = {"plain": [[1], [1], [1]], "slow": [[1], [2], [1]]}

    def way(name: str) -> probe.Way:
        return lambda case, turn: Counts(texts[name].pop(0), 1, 1, float(len(texts[name])))

    rows = list(probe.Turns({name: way(name) for name in texts}, repeats=2).rows(Case("a", [5])))
    assert [(row["equal"], row["first_difference"], "error" in row) for row in rows] == [
        (True, None, False), (False, 0, True),
    ]  # fmt: skip
    assert rows[1]["cpu_seconds"] == 0.0, "the run with the other text was the slower one"


# the probes


def test_random_model_has_half_a_billion_weights() -> None:
    model = load_model("random", "bfloat16", "meta")
    assert 450e6 < sum(parameter.numel() for parameter in model.parameters()) < 500e6


@pytest.mark.slow_by_nature("runs the commands of the page")
@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ("prices", {"host", "step", "prepared", "launches", "kernel of a step"}),
        ("engine", {"engine"}),
        ("prompts ragged", {"prompts", "ragged"}),
        ("kernels", {"likeliest"}),
        ("serve", {"serve"}),
        ("speed", {"text of one"}),
    ],
)
def test_the_parts_for_a_gpu_run_without_one(measure: Measure, tmp_path: Path, parts: str, kinds: set[str]) -> None:
    files = []
    for name in ("edits", "traces"):
        row = {"id": name, "prompt": "def first(x):\n    return x\n", "output": "def first(x):\n    return x\n"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        files += [f"--{name}", tmp_path / f"{name}.jsonl"]
    small = ["--device", "cpu", "--tiny", 1, "--contexts", 64, "--repeats", 1, "--new-tokens", 8, "--texts", 1, *files]
    assert measure("gpu", *small, "--parts", *parts.split()) == 0
    rows = rows_in(tmp_path)
    assert {row["kind"] for row in rows} == {"header", *kinds}
    assert all(row.get("equal", True) for row in rows)
    assert all(row["tokens"] == 8 * row["clients"] for row in rows if row["kind"] == "serve")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_no_gpu_is_refused(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("gpu", "--parts", "right") == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_a_scripted_model_writes_its_texts_by_every_method() -> None:
    """Only the recorded token at its position leads to the next one, so no method reads ahead."""
    case = Case("a", [5, 6, 7, 5, 6], [7, 5, 6, 9, 8, 7, 5, 6, 9, 8])
    model, (first, second) = scripted(scripted_model("tiny", "float32", "cpu"), [case, replace(case, answer=[4, 4, 4])])
    assert not {*first.prompt, *first.answer} & {*second.prompt, *second.answer}
    for written in (first, second):
        for config in (None, LookaheadConfig(), LookaheadConfig(preset="paper"), LookaheadConfig(engine="static")):
            counts = generate(model, replace(written, answer=()), config, max_new_tokens=len(written.answer))
            assert list(counts.tokens) == written.answer
    ids, positions = torch.tensor([[first.answer[0], first.answer[1]]]), torch.tensor([[5, 7]])
    follows = model(input_ids=ids, position_ids=positions).logits.argmax(dim=-1)
    assert follows[0, 0] == first.answer[1]
    assert follows[0, 1] == 1 + 7 * first.answer[1] % 4095


@pytest.mark.slow_by_nature("simulates a device, in another process, as it patches torch")
@pytest.mark.usefixtures("compiled_loops")
def test_greedy_steps_wait_once_and_copy_once(tmp_path: Path) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "rows.jsonl"
    texts.write_text(json.dumps({"id": "a", "prompt": "def first(x):\n    return x\n" * 4}) + "\n")
    program = str(Path(probe.__file__).parent / "__main__.py")
    options = ["--texts", str(texts), "--rows", "2", "--selections", "greedy", "--output", str(output)]
    run = run_program(program, "waits", *options)
    assert run.returncode == 0, run.stderr
    rows = rows_in(tmp_path)
    assert [row["kind"] for row in rows] == ["header", "generate", "engine", "generate", "engine"]
    assert all(row["waits"] == 1 for row in rows[1:])
    plain = [row for row in rows[1:] if row["method"] == "no drafts"]
    assert all((row["copies"], row["replays"], row["launches"]) == (1, 1, 0) for row in plain)


def test_a_unit_that_fails_does_not_end_the_half_hour() -> None:
    def work() -> Any:
        yield {"kind": "step"}
        raise RuntimeError("out of memory")

    rows = list(importlib.import_module("gpu").guarded(work))
    assert [row["kind"] for row in rows] == ["step", "failed"]
    assert "out of memory" in rows[1]["error"]


def test_tokens_that_end_steps_are_proposed_or_not_and_bound_what_ranking_brings(
    measure: Measure, tmp_path: Path
) -> None:
    lines = [json.dumps({"id": name, "prompt": f"def {name}(numbers):\n    total = 0\n"}) for name in ("one", "two")]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    assert measure("step_ends", "--data", tmp_path, "--tasks", "short", "--nodes", 16, "--limit", 1) == 0
    steps = [row for row in rows_in(tmp_path) if row["kind"] == "step"]
    assert {row["id"] for row in steps} == {"two"}
    assert 64 < sum(row["tokens"] for row in steps) < 128
    for row in steps:
        assert row["tokens"] <= row["ranking"] <= 16
        assert row["tokens"] <= row["coverage"] <= 16
        assert row["first"] <= row["proposed"] == (row["probability"] > 0)
    assert {row["proposed"] for row in steps} == {0, 1}
