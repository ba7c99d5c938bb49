"""`lookahead trace` and `--trace`: the page of a run, and refusals before it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lookahead.cli import main
from standard_input import StandardInput
from word_model import save_word_model

pytestmark = pytest.mark.usefixtures("compiled_loops")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "words"
    save_word_model(folder)
    return folder


def texts_of(path: Path) -> list[dict[str, Any]]:
    data = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    return json.loads(data[1])["texts"]


def test_trace_writes_a_page_of_the_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "trace.html"
    assert main(["trace", "-o", str(page), "w1 w2 w3", "--model", str(model), "-n", "12", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (text,) = texts_of(page)
    assert text["tokens"] == 12
    assert "".join(step["x"] for step in text["steps"]).split() == result["text"].split()
    assert [len(step["k"]) for step in text["steps"]] == result["accepted_lengths"]


def test_trace_records_every_turn_of_a_chat(model: Path, stdin: StandardInput, tmp_path: Path) -> None:
    stdin.lines("w1 w2", "w3")
    page = tmp_path / "trace.html"
    assert main(["chat", "--raw", "--model", str(model), "-n", "6", "--trace", str(page)]) == 0
    assert [text["tokens"] for text in texts_of(page)] == [6, 6]


@pytest.mark.parametrize("command", [["chat"], ["trace", "w1"]])
def test_a_path_is_refused_before_anything_is_loaded(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    option = "-o" if command[0] == "trace" else "--trace"
    assert main([*command, option, "/no folder/x.html", "--model", "/no model"]) == 2
    assert "/no folder/x.html cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "--raw"], ["trace", "w1"]])
def test_a_file_that_is_no_trace_is_left_alone(
    command: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "-o" if command[0] == "trace" else "--trace"
    path = tmp_path / "page.html"
    for content in ("mine", "<!doctype html>\n<title>mine</title>"):
        path.write_text(content)
        assert main([*command, option, str(path), "--model", str(model)]) == 2
        assert f"{path} is not a trace page" in capsys.readouterr().err
        assert path.read_text() == content
    assert main([*command, option, "-", "--model", str(model)]) == 2
    assert "'-' is not a file" in capsys.readouterr().err
    assert not Path("-").exists()


def test_a_page_of_an_earlier_run_and_an_empty_file_are_replaced(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.touch()
    for tokens in ("3", "5"):
        assert main(["trace", "-o", str(page), "w1 w2", "--model", str(model), "-n", tokens]) == 0
        assert [text["tokens"] for text in texts_of(page)] == [int(tokens)]
