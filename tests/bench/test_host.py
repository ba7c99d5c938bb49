"""The host's part of a step: a stub model replays recorded texts, and each part is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lookahead
from cases import Case
from command import main
from preloaded import run_program
from stubbed import PROBABILITIES, Table

ROOT = Path(__file__).resolve().parents[2]


def test_equal_tokens_of_several_texts_are_kept_apart() -> None:
    table = Table(40)
    cases = [table.add(Case(str(number), [5] * 9, [5] * 9 + [number])) for number in range(4)]
    for case in cases:
        text = torch.tensor([*case.prompt, *case.answer])
        logits = table.logits(text[8:-1], torch.arange(8, len(text) - 1))
        assert logits.argmax(dim=-1).tolist() == case.answer
        assert logits.softmax(dim=-1).max(dim=-1).values.tolist() == pytest.approx([PROBABILITIES[0]] * 10, rel=1e-3)
    assert len({tuple(case.answer) for case in cases}) == 4


@pytest.mark.slow_by_nature("decodes texts by parts, in a process of its own")
@pytest.mark.usefixtures("compiled_loops")
def test_recorded_texts_are_served_and_their_steps_timed_by_part(tmp_path: Path) -> None:
    texts, source = tmp_path / "texts.jsonl", Path(lookahead.__file__).parents[1]
    lines = [f"    y{number} = x * {number * 7 % 13}\n" for number in range(40)]
    rows = [{"id": str(first), "prompt": "def f(x):\n", "output": "".join(lines[first:])} for first in range(3)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = [{"open": "no drafts, temperature", "rows": 2}, {"turn": 0}, {"open": "auto", "rows": 0}, {"turn": 0}]
    worker = [str(ROOT / "benchmarks/host_worker.py"), "--src", str(source), "--texts", str(texts)]
    given = "".join(json.dumps(request) + "\n" for request in requests)
    process = run_program(*worker, "--prompt", "16", "--new-tokens", "32", given=given, OMP_NUM_THREADS="1")
    assert process.returncode == 0, process.stderr
    ready, _, engine, _, call = (json.loads(line) for line in process.stdout.splitlines())
    assert ready
    parts = {"launched", "verify", "commit", "watch", "learn", "notify", "draft", "stage"}
    assert parts | {"plan"} == engine["parts_us"].keys()
    assert parts == call["parts_us"].keys()
    for figures in (engine, call):
        assert figures["equal"]
        assert figures["us"] > 0
        assert figures["tokens"] >= 1


def test_an_unknown_commit_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["host", "--base", "guessing", "--output", str(tmp_path / "rows.jsonl")]) == 2
    finally:
        torch.set_num_threads(threads)
    assert "--base 'guessing': " in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
