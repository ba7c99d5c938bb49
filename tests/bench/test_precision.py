"""The benchmark of low precision: rows that survive an interruption, and a page that says what the rows say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

precision = importlib.import_module("precision")
write_precision = importlib.import_module("write_precision")
write_results = importlib.import_module("write_results")

PROMPTS = [{"id": "p/0", "prompt": "import os\n"}, {"id": "p/1", "prompt": "class Stack:\n    def push("}]
METHODS = ["autoregressive", "margin 0", "margin 0.5", "copies", "batch", "float32"]


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., int]:
    """Run the measuring command on the demo model, with more arguments if given; returns its exit status."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    arguments = ["--model", "demo", "--prompts", str(prompts), "--name", "words", "--margins", "0.5,0"]
    arguments += ["--max-new-tokens", "8", "--output", str(tmp_path / "precision-words.jsonl")]
    return lambda *more: int(precision.main([*arguments, *more]))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "precision-words.jsonl").read_text().splitlines()]


def test_rows_hold_what_was_measured(measure: Callable[..., int], tmp_path: Path) -> None:
    assert measure("--limit", "1") == 0
    early = rows_of(tmp_path)
    assert measure() == 0, "the rest is measured, and the early rows stay"
    header, probe, *rows = rows_of(tmp_path)
    assert [probe, *rows][: len(early) - 1] == early[1:]
    assert (header["kind"], header["benchmark"], header["dtype"]) == ("header", "precision", "bfloat16")
    assert "--margins 0,0.5" in header["command"]
    assert str(tmp_path) not in (tmp_path / "precision-words.jsonl").read_text()
    assert 0 <= probe["linear"] <= 1
    assert 0 <= probe["attention"] <= 1
    references = {row["id"]: row for row in rows if row["kind"] == "reference"}
    measured = [row for row in rows if row["kind"] == "measurement"]
    assert [(row["id"], row["method"]) for row in measured] == [(p["id"], m) for p in PROMPTS for m in METHODS]
    for row in measured:
        reference = references[row["id"]]
        assert len(reference["gaps"]) == reference["tokens"]
        assert row["identical"] == (row["first_difference"] is None)
        assert row["identical"] or row["gap"] == reference["gaps"][row["first_difference"]]
    control = [row for row in measured if row["method"] == "autoregressive"]
    assert all(row["identical"] and row["steps"] == row["tokens"] for row in control)
    assert write_results.read_results(tmp_path / "precision-words.jsonl") is None, "that page has other rows"
    page = write_precision.page([write_precision.read_precision(tmp_path / "precision-words.jsonl")])
    assert "all 2 texts are the same" in page


def test_until() -> None:
    assert precision.until([4, 7, 2, 2, 2], {2}) == [4, 7, 2]
    assert precision.until([4, 7], {None}) == [4, 7]


def test_probe_finds_no_difference_where_there_is_none() -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.float64)
    layer.weight.data.fill_(0.5)
    assert not precision.linear_changes(layer, torch.ones(5, 8, dtype=torch.float64)).any()


@pytest.mark.parametrize("text", ["a", "0.5,", "-1"])
def test_margins_that_cannot_be_used(
    text: str, measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        measure(f"--margins={text}")
    assert "must be" in capsys.readouterr().err


def measurement(name: str, method: str, place: int | None, steps: int = 50) -> dict[str, Any]:
    gap = None if place is None else 0.125
    row = {"kind": "measurement", "id": name, "method": method, "tokens": 100, "identical": place is None}
    return row | {"first_difference": place, "gap": gap, "steps": steps, "undrafted": 0}


def page_of(folder: Path, methods: dict[str, list[int | None]]) -> str:
    """The page for rows with these first differences, one for each prompt."""
    model = {"name": "tiny", "architecture": "Llama", "parameters": 1234, "vocabulary": 40, "weights": "sha256 0"}
    header = {"kind": "header", "benchmark": "precision", "name": "words", "model": model, "dtype": "bfloat16"}
    header |= {"prompts": {"file": "words.jsonl", "sha256": "0", "count": 2}, "max_new_tokens": 100}
    header |= {"machine": {"device": "A Processor", "threads": 1}, "versions": {"torch": "2"}, "date": "2000-01-01"}
    rows = [header | {"command": "python benchmarks/precision.py --model tiny"}]
    for prompt in range(2):
        name = f"p/{prompt}"
        rows.append({"kind": "reference", "id": name, "gaps": [0.0, 0.125, *[2.0] * 98]})
        steps = {"margin 0": 40}
        rows += [measurement(name, method, at[prompt], steps.get(method, 50)) for method, at in methods.items()]
    path = folder / "precision-words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(write_precision.page([write_precision.read_precision(path)]))


def test_page_says_what_the_rows_say(tmp_path: Path) -> None:
    control = {"autoregressive": [None, None]}
    scale = {"copies": [None, None], "batch": [9, None], "float32": [None, None]}
    page = page_of(tmp_path, control | {"margin 0": [9, 49], "margin 0.5": [None, 49]} | scale)
    # 10 + 50 tokens were compared, up to the first difference of each text
    assert "| lookahead | **2** of 2 | 34 to 100 % | 33.33 | 29 (9 to 49) | 0.125, 0.125 |" in page
    assert "On 1 of the 2 prompts one of those differs as well." in page
    assert (
        "at most 0.125 apart; 2.0 % of the tokens of the plain texts are as close as that, and 1.0 % are exact" in page
    )
    assert "| 0.5 | 200 | 100 | 0 | 2.00 | +25 % | 1 |" in page
    assert "`tie_margin=0.5` left the fewest." in page
    assert "A Processor" in page


def test_page_says_when_a_margin_brings_nothing_or_plain_steps_differ(tmp_path: Path) -> None:
    page = page_of(tmp_path, {"autoregressive": [3, None], "margin 0": [9, None], "margin 0.5": [9, 49]})
    assert "**No margin made it better" in page
    assert "That is a bug" in page


def test_page_needs_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_precision.main(["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]) == 1
    assert "no measurements" in capsys.readouterr().err
