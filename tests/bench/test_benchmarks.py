"""The benchmark scripts: rows that survive an interruption, and a page that says what the rows say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from word_model import WORDS, save_word_model

step_compression = importlib.import_module("step_compression")
write_results = importlib.import_module("write_results")

METHODS = list(step_compression.METHODS)
PROMPTS = [
    {"id": "p/0", "task": "words", "prompt": "w1 w2 w3 w4 w1 w2"},
    {"id": "p/1", "task": "words", "turns": ["w9 w8 w7", "a second turn, not used"]},
    {"id": "p/2", "prompt": "w30 w31 w30 w31 w30"},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of forty words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_word_model(folder, max_position_embeddings=128)
    return folder


@pytest.fixture
def measure(model_folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the measuring command on the tiny model, with more arguments if given; returns its exit status."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    arguments = ["--model", str(model_folder), "--prompts", str(prompts), "--name", "words"]
    arguments += ["--max-new-tokens", "16", "--output", str(tmp_path / "results" / "words.jsonl")]

    def run(*more: str) -> int:
        return int(step_compression.main([*arguments, *more]))

    return run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Where `measure` writes."""
    return tmp_path / "results" / "words.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Let so many measurements pass, then act as if Ctrl-C were pressed."""
    generate_with, left = step_compression.generate_with, calls

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return generate_with(*arguments)

    monkeypatch.setattr(step_compression, "generate_with", interrupted)


def test_rows_hold_what_was_measured(measure: Callable[..., int], results: Path, tmp_path: Path) -> None:
    assert measure() == 0
    header, *rows = rows_of(results)
    assert header["kind"] == "header"
    assert header["model"]["name"] == "tiny"
    assert header["prompts"]["file"] == "prompts.jsonl"
    assert header["prompts"]["count"] == 3
    assert str(tmp_path) not in results.read_text(), "no path of this machine may be in the results"

    references = {row["id"]: row for row in rows if row["kind"] == "reference"}
    measured = [row for row in rows if row["kind"] == "measurement"]
    assert list(references) == ["p/0", "p/1", "p/2"]
    assert [(row["id"], row["method"]) for row in measured] == [(p["id"], m) for p in PROMPTS for m in METHODS]
    for row in measured:
        assert row["identical"]
        assert row["first_difference"] is None
        assert row["tokens"] == len(references[row["id"]]["output"]) == 16
        assert sum(int(length) * count for length, count in row["accepted_lengths"].items()) == 16
        assert sum(row["accepted_lengths"].values()) == row["steps"]
        assert row["S"] == round(16 / row["steps"], 4)
        assert row["cycle_share"] == references[row["id"]]["cycle_share"]
        assert row["steps_before_cycles"] <= row["tokens_before_cycles"] <= 16
    assert all(row["steps"] == 16 for row in measured if row["method"] == "autoregressive")


def test_finished_run_measures_nothing_again(
    measure: Callable[..., int], results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure() == 0
    before = results.read_text()
    interrupt_after(monkeypatch, 0)
    assert measure() == 0
    assert results.read_text() == before


def test_interrupted_run_goes_on(measure: Callable[..., int], results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert measure() == 130
    early = rows_of(results)
    assert sum(row["kind"] == "measurement" for row in early) == 7

    with results.open("a") as file:
        file.write('{"kind": "measurement", "id": "p/')  # a crash in the middle of a line
    assert measure() == 0
    whole = rows_of(results)
    assert whole[: len(early)] == early
    assert measure("--restart") == 0
    assert rows_of(results)[1:] == whole[1:], "an interruption must not change what is measured"


def test_more_prompts_and_methods_join_the_rows_that_are_there(measure: Callable[..., int], results: Path) -> None:
    assert measure("--limit", "1", "--methods", "paper") == 0
    assert [row["kind"] for row in rows_of(results)] == ["header", "reference", "measurement"]
    assert "--limit 1 --methods paper" in rows_of(results)[0]["command"]
    assert measure() == 0
    assert len(rows_of(results)) == 1 + 3 + 3 * len(METHODS)
    assert "--limit" not in rows_of(results)[0]["command"]


def test_rows_measured_in_another_way_are_kept_apart(
    measure: Callable[..., int], results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure("--limit", "1") == 0
    before = results.read_text()
    assert measure("--limit", "1", "--max-new-tokens", "8") == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "max_new_tokens=16" in message
    assert "--restart" in message
    assert results.read_text() == before
    assert measure("--limit", "1", "--max-new-tokens", "8", "--restart") == 0
    assert {row["tokens"] for row in rows_of(results)[1:]} == {8}


def test_method_with_other_settings_is_kept_apart(
    measure: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure("--limit", "1", "--methods", "jacobi") == 0
    other = step_compression.LookaheadConfig(preset="jacobi", block_size=4)
    monkeypatch.setitem(step_compression.METHODS, "jacobi", other)
    assert measure("--limit", "1", "--methods", "jacobi") == 1
    assert "'jacobi'" in capsys.readouterr().err


def test_rows_from_before_a_setting_existed_are_gone_on_with(measure: Callable[..., int], results: Path) -> None:
    assert measure("--limit", "1", "--methods", "jacobi") == 0
    rows = rows_of(results)
    del rows[-1]["config"]["seed"]
    write_rows(results.parent, rows)
    assert measure("--limit", "2", "--methods", "jacobi") == 0
    assert rows_of(results)[1:3] == rows[1:]
    assert len(rows_of(results)) == 5


def test_a_difference_is_recorded_and_reported(
    measure: Callable[..., int], results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_with = step_compression.generate_with

    def wrong(*arguments: Any) -> Any:
        output, statistics = generate_with(*arguments)
        return [*output[:3], (output[3] + 1) % len(WORDS), *output[4:]], statistics

    monkeypatch.setattr(step_compression, "generate_with", wrong)
    assert measure("--limit", "1", "--methods", "paper") == 1
    row = rows_of(results)[-1]
    assert not row["identical"]
    assert row["first_difference"] == 3
    assert "Outputs that differ from plain `generate`: 1." in write_results.page(
        write_results.read_folder(results.parent)
    )


@pytest.mark.parametrize(
    ("output", "expected", "index"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [1], 0)],
)
def test_first_difference(output: list[int], expected: list[int], index: int | None) -> None:
    assert step_compression.first_difference(output, expected) == index


@pytest.mark.parametrize(
    ("tokens", "within"), [(0, []), (1, [1]), (3, [1]), (4, [1, 3]), (6, [1, 3, 2]), (9, [1, 3, 2])]
)
def test_steps_within(tokens: int, within: list[int]) -> None:
    assert step_compression.steps_within([1, 3, 2], tokens) == within


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": "a"}\n', "needs an `id`"),
        ('{"id": "a", "prompt": "x"}\nplain text\n', "line 2 is no JSON"),
        ('{"id": "a", "prompt": "x"}\n\n{"id": "a", "prompt": "y"}\n', "same `id` twice"),
    ],
)
def test_prompt_files_that_cannot_be_used(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(write_results.ResultsError, match=message):
        step_compression.read_prompts(path, None)


# --- the page ---


def measured(name: str, method: str, cycle_share: float, lengths: dict[str, int]) -> dict[str, Any]:
    """A measurement as step_compression.py would have recorded it: ten nodes a step, a cycle after four steps."""
    steps = sum(lengths.values())
    return {
        "kind": "measurement",
        "id": name,
        "method": method,
        "tokens": sum(int(length) * count for length, count in lengths.items()),
        "steps": steps,
        "nodes": 10 * steps,
        "accepted_lengths": lengths,
        "identical": True,
        "cycle_share": cycle_share,
        "tokens_before_cycles": 6,
        "steps_before_cycles": 4,
        "config": {"preset": "paper", "window_size": 3, "ngram_size": 4, "guess_set_size": 5}
        | {"pool_from_prompt": method == "paper+prompt", "pool_from_output": False},
    }


def header() -> dict[str, Any]:
    model = {"architecture": "Llama", "parameters": 1234, "vocabulary": 40, "weights": "sha256 0"}
    return {
        "kind": "header",
        "name": "words",
        "model": {"name": "tiny", **model},
        "dtype": "float32",
        "prompts": {"file": "words.jsonl", "sha256": "0", "count": 2},
        "max_new_tokens": 100,
        "machine": {"device": "A Processor", "threads": 1},
        "versions": {"torch": "2"},
        "date": "2000-01-01",
        "command": "python benchmarks/step_compression.py --model tiny",
    }


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "words.jsonl") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def reference(name: str, tokens: int, cycle_share: float) -> dict[str, Any]:
    shares = {"cycle_share": cycle_share, "final_cycle_share": cycle_share / 2}
    return {"kind": "reference", "id": name, "tokens": tokens, **shares}


def test_page_says_what_the_rows_say(tmp_path: Path) -> None:
    rows = [
        header(),
        reference("a", 40, 0.1),
        reference("b", 160, 0.8),
        measured("a", "paper", 0.1, {"1": 8, "2": 10, "6": 2}),  # 40 tokens in 20 steps, little repeated
        measured("b", "paper", 0.8, {"4": 40}),  # 160 tokens in 40 steps
    ]
    write_rows(tmp_path, rows)
    page = write_results.page(write_results.read_folder(tmp_path))
    assert "## words, tiny" in page
    # S = 200 / 60; of a single prompt 2 and 4; 0.1 * 40 + 0.8 * 160 = 132 of 200 tokens in cycles
    figures = "10.0 | **3.33** | 2.00 to 4.00 | 66 % | 1.50 (12) | 2.00 (1) | 2 of 2"
    assert f"| lookahead W=3, N=4, G=5 | {figures} |" in page
    assert "| lookahead W=3, N=4, G=5 | 13 % | 17 % | 0 % | 67 % | 3 % |" in page
    assert "66 % lies in a repeated cycle, 33 % in one that lasts to the end" in page
    assert "1 of 2 prompts have less than 20 %" in page
    assert "More than half of this output is repetition" in page
    assert "fewer than 32 tokens" not in page
    for expected in ("A Processor", "1,234 parameters", "float32", "torch 2", "2 of 2", header()["command"]):
        assert expected in page
    assert "Unfinished" not in page
    assert "Outputs that differ" not in page


def test_page_says_when_rows_are_missing_or_all_repeated(tmp_path: Path) -> None:
    rows = [header(), reference("a", 20, 0.5), reference("b", 80, 0.5)]
    rows += [measured("a", "paper", 0.5, {"2": 10}), measured("b", "paper", 0.5, {"2": 40})]
    rows += [measured("a", "paper+prompt", 0.5, {"2": 10})]
    write_rows(tmp_path, rows)
    page = write_results.page(write_results.read_folder(tmp_path))
    assert "**Unfinished:**" in page
    assert "| no such prompt | 1 of 1 |" in page
    assert "| lookahead W=3, N=4, G=5, pool also from prompt | 10.0 | **2.00** |" in page


def test_outputs_too_short_to_repeat_do_not_count_as_little_repeated(tmp_path: Path) -> None:
    rows = [header(), reference("a", 1, 0.0), reference("b", 80, 0.4)]
    rows += [measured("a", "paper", 0.0, {"1": 1}), measured("b", "paper", 0.4, {"2": 40})]
    rows[-2] |= {"tokens_before_cycles": 0, "steps_before_cycles": 0}
    rows[-1] |= {"tokens_before_cycles": 0, "steps_before_cycles": 0}
    write_rows(tmp_path, rows)
    page = write_results.page(write_results.read_folder(tmp_path))
    assert "Outputs of fewer than 32 tokens, too short to be counted there: 1." in page
    assert "| – | no such prompt | 2 of 2 |" in page
    assert "More than half" not in page


def test_page_is_the_same_every_time(tmp_path: Path) -> None:
    rows = [header(), reference("a", 20, 0.5), measured("a", "paper", 0.5, {"2": 10})]
    write_rows(tmp_path / "results", rows, "b.jsonl")
    write_rows(tmp_path / "results", rows, "a.jsonl")
    write_rows(tmp_path / "results", [header()], "begun.jsonl")
    arguments = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "docs" / "results.md")]
    assert write_results.main(arguments) == 0
    first = (tmp_path / "docs" / "results.md").read_text()
    assert write_results.main(arguments) == 0
    assert (tmp_path / "docs" / "results.md").read_text() == first
    assert first.index("results/a.jsonl") < first.index("results/b.jsonl")
    assert "begun.jsonl" not in first, "a file without measurements has nothing to show"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no measurements"), ('{"kind": "reference"}\n', "no header row"), ("{\n{}\n", "line 1 is no JSON")],
)
def test_page_is_not_written_from_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    assert write_results.main(["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
