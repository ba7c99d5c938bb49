"""Replays: recordings, rows of the probe, and refusals."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from cases import read_cases, tokenizer_of
from command import main
from lookahead.demo import demo_model_path

EDIT = {
    "id": "e",
    "instruction": "rename",
    "input": "def first(x):\n    return x\n",
    "output": "def one(x):\n    return x\n",
}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_an_edit_expects_its_input(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    path.write_text(json.dumps(EDIT) + "\n", encoding="utf-8")
    (recording,) = read_cases(path, letters)
    assert recording.expected == letters(EDIT["input"])
    assert recording.prompt == letters(f"rename\n\n{EDIT['input']}\n\n")


def test_a_tekken_file_is_read(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    tokens = [bytes([value]) for value in range(256)] + [b"ab"]
    vocabulary = [
        {"rank": rank, "token_str": None, "token_bytes": base64.b64encode(token).decode()}
        for rank, token in enumerate(tokens)
    ]
    config = {"pattern": r"\w+|\W", "default_vocab_size": 277, "default_num_special_tokens": 20}
    config |= {"num_vocab_tokens": 257, "version": "v3"}
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocabulary}), encoding="utf-8")
    name, encode = tokenizer_of(path)
    assert (name, encode("abb")) == ("tekken.json", [276, 118])


def test_the_command_writes_rows_once(tmp_path: Path) -> None:
    path, output = tmp_path / "edits.jsonl", tmp_path / "rows.jsonl"
    path.write_text(json.dumps(EDIT) + "\n", encoding="utf-8")
    command = ["replay", "--recordings", str(path), "--output", str(output), "--tokenizer", str(demo_model_path())]
    assert main(command) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["kind"] for row in rows] == ["header", "text", *["replay"] * 5 * 6]
    assert all(0 < row["steps"] <= row["tokens"] for row in rows[2:])
    assert any(row["steps"] < row["tokens"] for row in rows[2:]), "matches in the prompt are accepted"
    before = output.read_bytes()
    assert main(command) == 0
    assert output.read_bytes() == before
    path.write_text(json.dumps({**EDIT, "output": "x"}) + "\n", encoding="utf-8")
    assert main(command) == 2
