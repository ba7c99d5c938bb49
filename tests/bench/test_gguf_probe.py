"""The probe of GGUF models: all ways of decoding run, with equal texts in float32."""

import importlib
import json
from pathlib import Path

import pytest

from gguf_files import REASON, tool

command = importlib.import_module("command")
pytest.importorskip("llama_cpp", reason=REASON)


@pytest.mark.usefixtures("compiled_loops")
def test_every_method_writes_the_float32_text(tmp_path: Path) -> None:
    tool()
    (tmp_path / "words.jsonl").write_text(json.dumps({"id": "a", "prompt": "def add(a, b):\n    return"}) + "\n")
    options = ["--prompts", str(tmp_path / "words.jsonl"), "--max-new-tokens", "24", "--types", "f32", "--nodes", "16"]
    output = tmp_path / "rows.jsonl"
    assert command.main(["gguf_models", *options, "--output", str(output)]) == 0
    rows = {row.get("method"): row for row in map(json.loads, output.read_text().splitlines())}
    exact = ["llama.cpp", "llama.cpp, prompt lookup", "no drafts", "lookahead"]
    for method in (*exact, "lookahead, 16 nodes", "transformers", "sampled"):
        assert rows[method]["equal"] == 1
    assert rows["llama.cpp"]["steps"] == rows["no drafts"]["steps"] == 24
    assert rows["lookahead, 16 nodes"]["steps"] < 20
