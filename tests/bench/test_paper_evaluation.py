"""The repeated evaluation: what its rows and its page say, and that the pictures show what happened."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead.bench.scaling_law import Measured
from word_model import WORDS, save_word_model

evaluation = importlib.import_module("paper_evaluation")
writer = importlib.import_module("write_paper_evaluation")
pictures = importlib.import_module("method_pictures")
write_results = importlib.import_module("write_results")

FILES = {
    "words.jsonl": [
        {"id": "a/0", "task": "words", "prompt": "w1 w2 w3 w4 w1 w2"},
        {"id": "a/1", "task": "words", "prompt": "w9 w8 w7 w6"},
    ],
    "chat.jsonl": [
        {"id": "b/0", "task": "chat/long", "turns": ["w30 w31 w30 w31 w30", "not used"]},
        {"id": "b/1", "task": "chat/long", "turns": ["w3 w4"]},
        {"id": "b/2", "task": "chat/short", "turns": ["w5"]},
    ],
}
FEW = ("prompt lookup", "(5,15,15)", "(5,1,30)+text")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of forty words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_word_model(folder, max_position_embeddings=256)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of prompt files."""
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def measure(model_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a part with few methods; returns its exit status."""
    few = {name: evaluation.ABLATION[name] for name in FEW}
    monkeypatch.setattr(evaluation, "ABLATION", few)
    monkeypatch.setattr(evaluation, "GRID", few)

    def run(part: str, *more: str) -> int:
        arguments = [part, "--model", str(model_folder), "--data", str(data), "--max-new-tokens", "16"]
        arguments += ["--prompts", "words.jsonl,chat.jsonl", "--output", str(data / "results" / f"paper-{part}.jsonl")]
        return int(evaluation.main([*arguments, *more]))

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_hold_what_was_measured(measure: Callable[..., int], data: Path) -> None:
    assert measure("grid") == 0
    path = data / "results" / "paper-grid.jsonl"
    header, *rows = rows_of(path)
    assert (header["benchmark"], header["part"], header["model"]["name"]) == ("paper", "grid", "tiny")
    assert [file["file"] for file in header["prompts"]] == ["words.jsonl", "chat.jsonl"]
    assert str(data) not in path.read_text(), "no path of this machine may be in the results"
    assert write_results.read_results(path) is None, "another page's writer must pass these files over"
    measured = [row for row in rows if row["kind"] == "measurement"]
    assert [row["method"] for row in measured] == list(FEW) * 5
    for row in measured:
        assert row["identical"]
        assert row["tokens"] == 16
        assert sum(int(length) * count for length, count in row["accepted_lengths"].items()) == 16
        assert sum(row["accepted_lengths"].values()) == row["steps"]
        assert row["nodes"] >= row["steps"]
    settings = {row["method"]: row["config"] for row in measured}
    assert settings["prompt lookup"] == {"prompt_lookup_num_tokens": 10}
    assert settings["(5,1,30)+text"]["preset"] == "paper"
    assert settings["(5,1,30)+text"]["pool_from_prompt"] is True
    assert settings["(5,15,15)"]["pool_from_output"] is False


def test_interrupted_run_goes_on(measure: Callable[..., int], data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_with, calls = evaluation.decode_with, Counter[str]()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls["made"] += 1
        if calls["made"] == 5:
            raise KeyboardInterrupt
        return decode_with(*arguments, **named)

    monkeypatch.setattr(evaluation, "decode_with", interrupted)
    assert measure("tasks", "--per-task", "1") == 130
    early = rows_of(data / "results" / "paper-tasks.jsonl")
    assert sum(row["kind"] == "measurement" for row in early) == 4
    assert measure("tasks", "--per-task", "1") == 0
    whole = rows_of(data / "results" / "paper-tasks.jsonl")
    assert whole[: len(early)] == early
    assert calls["made"] == 5 + 2
    assert measure("tasks", "--per-task", "1", "--max-new-tokens", "8") == 1, "other settings need another file"


def test_sampling_is_compared_seed_for_seed(measure: Callable[..., int], data: Path) -> None:
    assert measure("sampling", "--per-task", "1", "--seeds", "2") == 0
    rows = [row for row in rows_of(data / "results" / "paper-sampling.jsonl") if row["kind"] == "measurement"]
    assert all(row["identical"] for row in rows)
    settings = len(evaluation.SAMPLING)
    assert Counter(row["id"] for row in rows) == {
        "a/0 seed 0": settings,
        "a/0 seed 1": settings - 1,  # greedy draws nothing: one seed is enough
        "b/0 seed 0": settings,
        "b/0 seed 1": settings - 1,
    }


def test_a_difference_is_recorded_and_reported(
    measure: Callable[..., int], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_with = evaluation.decode_with

    def wrong(*arguments: Any, **named: Any) -> Any:
        decoded = decode_with(*arguments, **named)
        decoded.output[3] = (decoded.output[3] + 1) % len(WORDS)
        return decoded

    monkeypatch.setattr(evaluation, "decode_with", wrong)
    assert measure("tasks", "--per-task", "1") == 1
    parts = [writer.read_part(data / "results" / "paper-tasks.jsonl")]
    assert {row["first_difference"] for row in parts[0].measurements} == {3}
    assert "6 outputs differ" in writer.warnings(parts)[0]


def test_prompts_are_taken_from_each_task_and_its_parts_in_turn(data: Path) -> None:
    files = [data / name for name in FILES]
    chosen = evaluation.choose_prompts(files, 2)
    assert [prompt.id for prompt in chosen] == ["a/0", "a/1", "b/0", "b/2"]
    assert len(evaluation.choose_prompts(files, None)) == 5


def test_files_that_are_not_there(measure: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("grid", "--prompts", "words.jsonl,missing.jsonl") == 1
    assert "missing.jsonl: no such file" in capsys.readouterr().err


# --- the page ---


def measured(method: str, n: int, w: int, g: int, lengths: dict[int, int], text: bool = False) -> dict[str, Any]:
    """A measurement of one prompt as paper_evaluation.py would have recorded it."""
    steps, tokens = sum(lengths.values()), sum(length * count for length, count in lengths.items())
    config = {"preset": "paper", "ngram_size": n, "window_size": w, "guess_set_size": g}
    return {
        "kind": "measurement",
        "id": "a/0",
        "task": "words",
        "method": method,
        "tokens": tokens,
        "steps": steps,
        "nodes": 10 * steps,
        "accepted_lengths": {str(length): count for length, count in lengths.items()},
        "identical": True,
        "cycle_share": 0.25,
        "tokens_before_cycles": 12,
        "steps_before_cycles": 8,
        "cpu_seconds": 3.0,
        "config": config | {"pool_from_prompt": text, "pool_from_output": text},
    }


def grid_rows() -> list[dict[str, Any]]:
    model = {"name": "tiny", "architecture": "Llama", "parameters": 1234, "vocabulary": 40, "weights": "sha256 0"}
    header = {
        "kind": "header",
        "benchmark": "paper",
        "part": "grid",
        "model": model,
        "dtype": "float32",
        "prompts": [{"file": "words.jsonl", "sha256": "0"}],
        "max_new_tokens": 40,
        "machine": {"device": "A Processor", "threads": 1},
        "versions": {"torch": "2"},
        "date": "2000-01-01",
        "command": "python benchmarks/paper_evaluation.py grid",
    }
    plain = {"kind": "reference", "id": "a/0", "task": "words", "tokens": 40, "cpu_seconds": 2.0}
    plain["output"] = list(range(40))
    return [
        header,
        plain | {"cycle_share": 0.25, "final_cycle_share": 0.125},
        measured("(5,15,15)", 5, 15, 15, {1: 10, 3: 10}),  # 40 tokens in 20 steps
        measured("(5,15,15)+text", 5, 15, 15, {1: 8, 4: 8}, text=True),
        measured("(3,1,1)", 3, 1, 1, {1: 24, 2: 8}),
        measured("(5,1,15)", 5, 1, 15, {1: 30, 2: 5}),
    ]


def test_page_says_what_the_rows_say(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "paper-grid-tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in grid_rows()))
    arguments = ["--results", str(results), "--output", str(tmp_path / "docs" / "paper.md")]
    assert writer.main(arguments) == 0
    page = (tmp_path / "docs" / "paper.md").read_text()
    assert "| 8: (5, 15, 15) | no | 1.96 | **2.00** | 2.00 to 2.00 | 1.50 | 10.0 | 1.50 | 1 of 1 |" in page
    assert "| 9: (5, 15, 15) | yes | 2.05 | **2.50** |" in page
    assert "| words | 1 | 40 | 40 | 25 % | 12 % |" in page
    assert "| N=3 | **1.25**" in page
    assert "| W, with G=15 | 1.14 | 2.00 |" in page
    assert "| words, tiny: (5, 15, 15) | 2.00 | 50 % | 0 % | 50 % | 0 % | 0 % |" in page
    for name in ("paper-sizes-tiny.png", "paper-law-tiny.png", "paper-lengths.png"):
        assert f"(images/{name})" in page
        assert (tmp_path / "docs" / "images" / name).stat().st_size > 10_000
    (tmp_path / "docs" / "paper.md").write_text(f"My words.\n{page}More words.\n")
    assert writer.main(arguments) == 0
    assert (tmp_path / "docs" / "paper.md").read_text() == f"My words.\n{page}More words.\n"


def test_points_of_the_law_have_equal_branches_and_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "paper-grid.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in grid_rows()))
    part = writer.read_part(path)
    assert writer.square_points(part) == [Measured(15, 5, 2.0), Measured(1, 3, 1.25)]
    assert writer.side_points(part) == {"W, with G=15": {15: 2.0, 1: pytest.approx(40 / 35)}}


def test_page_is_not_written_from_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(tmp_path), "--output", str(tmp_path / "paper.md")]
    assert writer.main(arguments) == 1
    assert "no measurements" in capsys.readouterr().err
    rows = grid_rows()
    (tmp_path / "paper-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "paper.md").write_text("a page without marks\n")
    assert writer.main(arguments) == 1
    assert "has no lines" in capsys.readouterr().err
    assert (tmp_path / "paper.md").read_text() == "a page without marks\n"
    (tmp_path / "paper-y.jsonl").write_text(json.dumps(rows[0] | {"benchmark": "other"}) + "\n")
    assert writer.main(arguments) == 1
    assert "was not made by" in capsys.readouterr().err


# --- the pictures ---


def test_pictures_show_steps_as_they_were(model_folder: Path, tmp_path: Path) -> None:
    model, _ = evaluation.load_model(str(model_folder), "float32", "cpu")
    prompt = [1, 2, 3, 4, 1, 2]
    steps = pictures.watch(model, prompt, 100)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False)[0, len(prompt) :].tolist()
    assert [token for step in steps for token in step.tokens] == plain

    step = pictures.choose_step(steps)
    assert tuple(step.tree.tokens[node] for node in step.path) in {guess[: len(step.path)] for guess in step.guesses}
    places = pictures.tree_places(step)
    assert len(places) == len(step.tree) - step.tree.root
    assert len(set(places.values())) == len(places), "no two nodes in one place"

    life = pictures.choose_life(steps)
    n = pictures.NGRAM_SIZE
    for index, token in enumerate(life.tokens):
        assert steps[life.found - n + 1 + index].new_row[life.column] == token, "one token a step, in one column"
    assert life.tokens in steps[life.found].ngrams
    assert life.tokens[0] == steps[life.accepted].root
    assert life.tokens[1:] in steps[life.accepted].guesses
    assert life.found < life.accepted < life.found - n + 1 + pictures.SHOWN_STEPS

    arguments = ["--model", str(model_folder), "--prompt", "w1 w2 w3 w4 w1 w2", "--output", str(tmp_path / "images")]
    assert pictures.main(arguments) == 0
    found = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert found == ["method-mask.png", "method-tree.png", "method-window.png"]


def test_text_without_accepted_candidates_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model_folder), "--prompt", "w1", "--tokens", "2", "--output", str(tmp_path)]
    assert pictures.main(arguments) == 1
    assert "choose another --prompt" in " ".join(capsys.readouterr().err.split())
