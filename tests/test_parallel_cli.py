"""`lookahead generate --parallel`: the text of one process, one error if a rank fails, and nobody left behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lookahead.cli import main
from lookahead.parallel.launcher import run_ranks

PROMPT = "def add(a, b):"
ARGUMENTS = ["generate", PROMPT, "--preset", "paper", "-n", "16", "--json"]


def test_the_text_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    wanted = json.loads(capsys.readouterr().out)
    command = [sys.executable, "-m", "lookahead", *ARGUMENTS, "--parallel", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)  # one object: the other rank is silent
    assert got["text"] == wanted["text"]


def test_a_rank_that_fails_stops_the_others() -> None:
    """Also those that would never end."""
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert run_ranks(2, [sys.executable, "-c", code], grace=1.0) == 3


def test_standard_input_reaches_every_rank() -> None:
    code = "import sys; sys.exit(sys.stdin.read() != 'text')"
    assert run_ranks(2, [sys.executable, "-c", code], b"text") == 0


def test_a_number_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--parallel", "0"]) != 0
    assert "at least 1" in capsys.readouterr().err
