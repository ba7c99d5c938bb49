"""Commands on simulated operating systems: `tests/support/systems` hides modules and functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from server_process import ServerProcess

SYSTEMS = Path(__file__).parents[1] / "support" / "systems"
PROMPT = "def add(a, b):\n"
NEW_TOKENS = 8


@pytest.fixture(params=["windows", "macos"])
def system(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables that simulate another system in child processes."""
    paths = [SYSTEMS / request.param, Path(lookahead.__file__).parents[1]]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def expected(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> str:
    """Text of `model.generate` after the prompt."""
    model, tokenizer = demo
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True))


def run(system: dict[str, str], *arguments: str) -> Any:
    command = [sys.executable, "-m", "lookahead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=system)


@pytest.mark.slow_by_nature("starts Python anew")
@pytest.mark.parametrize("system", ["windows"], indirect=True)
def test_text_is_generated(system: dict[str, str], demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    ended = run(system, "generate", PROMPT, "-n", str(NEW_TOKENS), "--dtype", "float32", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["text"] == expected(demo)


@pytest.mark.slow_by_nature("starts Python anew")
def test_requests_are_answered(system: dict[str, str], demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    request = {"model": "demo", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    server = ServerProcess("--dtype", "float32", from_scratch=True, environment=system)
    with server, httpx.Client(timeout=600) as client:
        answer = client.post(f"{server.url}/v1/completions", json=request).json()
        assert answer["choices"][0]["text"] == expected(demo)
        grammar = {"structured_outputs": {"regex": "[a-c]{3}=é"}}  # another process tries it
        answer = client.post(f"{server.url}/v1/completions", json=request | grammar | {"max_tokens": 20}).json()
        assert answer["choices"][0]["text"].endswith("=é"), answer
    assert server.process.returncode == 0


@pytest.mark.parametrize("system", ["windows"], indirect=True)
def test_several_processes_are_refused_where_they_cannot_be_started(system: dict[str, str]) -> None:
    ended = run(system, "generate", PROMPT, "--parallel", "2")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: --parallel 2 is not supported on Windows; leave it out\n"
