"""The script that measures how cost grows with the text."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

growth = importlib.import_module("growth")


def test_marks() -> None:
    marks = growth.Marks([2, 3, 10])
    for tokens in (1, 4, 9, 12):
        marks.note(tokens)
    assert [tokens for tokens, _, _ in marks.reached] == [4, 4, 12]
    marks.note(20)
    assert len(marks.reached) == 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script with runs in this process, on a model of one layer."""
    whole = growth.build_model

    def of_one_layer(longest: int) -> Any:
        model = whole(longest)
        del model.model.layers[1:]
        model.config.num_hidden_layers = 1
        model.config.layer_types = None
        return model

    # a process of its own would not leave transformers silent
    monkeypatch.setattr(growth.transformers.utils.logging, "set_verbosity_error", lambda: None)
    monkeypatch.setattr(growth, "build_model", of_one_layer)
    monkeypatch.setattr(growth, "in_own_process", growth.measure)


@pytest.mark.usefixtures("small")
def test_measures_once_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "growth.jsonl", tmp_path / "page.md"
    page.write_text("before\n<!-- growth: begin -->\n<!-- growth: end -->\nafter\n")
    arguments = ["--output", str(output), "--markdown", str(page), "--repeats", "1", "--lengths", "6", "18"]
    state = torch.random.get_rng_state()
    assert growth.main([*arguments, "--temperature", "0"]) == 0
    assert growth.main(arguments) == 0
    torch.random.set_rng_state(state)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows[0]["benchmark"] == "growth"
    assert [(row["temperature"], row["method"]) for row in rows[1:]] == [
        (temperature, method) for temperature in (0, 1) for method in growth.METHODS
    ]
    for row in rows[1:]:
        assert row["tokens"] == 18
        assert [mark["length"] for mark in row["marks"]] == [6, 18]
        assert row["marks"][1]["tokens"] == 18
        assert growth.identical(row, rows[1:])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "CPU ms per token, 7 to 18" in text
    assert text.count("| yes |") == 6
    before = output.read_text()
    assert growth.main(arguments) == 0
    assert output.read_text() == before, "nothing is measured twice"

    rows[2]["output"] = "0"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert growth.main(arguments) == 1
    assert "| NO |" in page.read_text()
    capsys.readouterr()

    rows[0]["versions"]["torch"] = "1"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert growth.main(arguments) == 1
    assert "--restart" in " ".join(capsys.readouterr().err.split())
