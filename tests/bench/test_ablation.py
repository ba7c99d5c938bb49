"""The ablation and the cost of drafting: what their rows and their page say, and that what is kept stays bounded."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.drafting import DraftMemory, NGramMemory
from lookahead.drafting.auto.scorer import MATCH_CLASSES, Acceptance
from model_zoo import VOCAB_SIZE, build, greedy
from word_model import save_word_tokenizer

ablation = importlib.import_module("ablation")
cost = importlib.import_module("drafting_cost")
writer = importlib.import_module("write_ablation")
write_results = importlib.import_module("write_results")

NODES = (8, 24)
PROMPT = [5, 8, 2, 5, 8, 2, 5]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of as many words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("llama", seed=0).save_pretrained(folder)
    save_word_tokenizer(folder, [f"w{number}" for number in range(VOCAB_SIZE)])
    return folder


@pytest.fixture
def measure(model_folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the ablation; returns its exit status."""
    prompts = [{"id": str(start), "prompt": " ".join(f"w{start + i % 3}" for i in range(8))} for start in (1, 4)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

    def run(*more: str) -> int:
        arguments = ["--model", str(model_folder), "--prompts", str(tmp_path / "words.jsonl"), "--name", "words"]
        arguments += ["--max-new-tokens", "16", "--output", str(tmp_path / "results" / "ablation-tiny.jsonl")]
        return int(ablation.main([*arguments, "--nodes", *map(str, NODES), *more]))

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", list(ablation.VARIANTS))
def test_every_variant_gives_the_same_text(name: str) -> None:
    variant, model = ablation.VARIANTS[name], build("llama", seed=0)
    for nodes in (12, 40):
        drafter = variant.drafter(nodes, variant.memory(), None)
        decoded = ablation.decode_with(drafter, model, torch.tensor([PROMPT]), 40)
        assert tuple(decoded.output) == greedy(model, tuple(PROMPT), 40)
        assert max(decoded.nodes) <= nodes
        assert sum(decoded.lengths) == 40


def test_fixed_order_is_matches_first_then_the_longest_context() -> None:
    acceptance = Acceptance(4)
    ablation.fix_order(acceptance)
    scores = acceptance.weights[3]
    log_probabilities = np.array([-0.1, -0.1, -5.0, 0.0])
    known = scores[:4] @ log_probabilities
    assert known == -5.0, "only the longest known context counts"
    matched = scores[4 : 4 + len(MATCH_CLASSES)]
    assert (np.diff(matched) > 0).all()
    assert matched.min() - 9.2 > 0 > known > scores[-1]


def test_rows_hold_what_was_measured_and_a_run_goes_on(
    measure: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_with, calls, stop_at = ablation.decode_with, Counter[str](), 40

    def interrupted(*arguments: Any) -> Any:
        calls["made"] += 1
        if calls["made"] == stop_at:
            raise KeyboardInterrupt
        return decode_with(*arguments)

    monkeypatch.setattr(ablation, "decode_with", interrupted)
    assert measure() == 130
    path = tmp_path / "results" / "ablation-tiny.jsonl"
    early = rows_of(path)
    assert measure() == 0
    header, *rows = rows_of(path)
    assert [header, *rows][: len(early)] == early
    assert write_results.read_results(path) is None, "another page's writer must pass these files over"
    assert str(tmp_path) not in path.read_text(), "no path of this machine may be in the results"
    measured = [row for row in rows if row["kind"] == "measurement"]
    each = len(ablation.VARIANTS) * len(NODES)
    assert len(measured) == 2 * each
    assert calls["made"] == 2 * each + 1 + len(NODES), "kept memories see the first prompt again"
    assert all(row["identical"] for row in measured)
    assert {row["method"] for row in measured} == {
        f"{name}, {nodes} nodes" for name in ablation.VARIANTS for nodes in NODES
    }
    monkeypatch.setattr(ablation, "decode_with", decode_with)
    whole = measured
    assert measure("--restart") == 0
    again = [row for row in rows_of(path) if row["kind"] == "measurement"]
    for row, other in zip(whole, again, strict=True):
        assert {**row, "cpu_seconds": 0} == {**other, "cpu_seconds": 0}, "an interruption changes nothing"


def test_page_says_what_the_rows_say(measure: Callable[..., int], tmp_path: Path) -> None:
    arguments = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "drafting.md")]
    assert writer.main(arguments) == 1, "nothing is measured yet"
    assert measure("--limit", "1") == 0
    options = ["--texts", "1", "--requests", "10", "--vocabulary", "4000"]
    assert cost.main([*options, "--output", str(tmp_path / "results" / "drafting-cost.jsonl")]) == 0
    assert writer.main(arguments) == 0
    page = (tmp_path / "drafting.md").read_text()
    part = writer.read_ablation(tmp_path / "results" / "ablation-tiny.jsonl")
    value, whole = (part.summary(name, NODES[0]).step_compression for name in ("fixed order", "all"))
    assert f"| fixed order | {value:.2f} ({100 * (value / whole - 1):+.0f} %) |" in page
    rows = rows_of(tmp_path / "results" / "drafting-cost.jsonl")
    times = [row["microseconds"]["whole"] for row in rows if row["kind"] == "steps"]
    assert f"| **drafting and observing** | {' | '.join(f'**{time:.0f}**' for time in times)} |" in page
    assert "the arrays never grow" in page
    assert "drafted the same trees" in page
    (tmp_path / "drafting.md").write_text(f"My words.\n{page}More words.\n")
    assert writer.main(arguments) == 0
    assert (tmp_path / "drafting.md").read_text() == f"My words.\n{page}More words.\n"
    (tmp_path / "drafting.md").write_text("a page without marks\n")
    assert writer.main(arguments) == 1


def test_a_difference_is_recorded_and_reported(
    measure: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_with = ablation.decode_with

    def wrong(*arguments: Any) -> Any:
        decoded = decode_with(*arguments)
        decoded.output[3] = (decoded.output[3] + 1) % VOCAB_SIZE
        return decoded

    monkeypatch.setattr(ablation, "decode_with", wrong)
    assert measure("--limit", "1") == 1
    measured = [row for row in rows_of(tmp_path / "results" / "ablation-tiny.jsonl") if row["kind"] == "measurement"]
    assert {row["first_difference"] for row in measured} == {3}


def test_what_is_kept_stays_the_same_size_over_1000_requests() -> None:
    memory = DraftMemory(NGramMemory(4, 1 << 11))
    marks = (1, 100, 500, 1000)
    rows = list(cost.serve(memory, 1000, 8000, marks, steps=5))
    assert [row["requests"] for row in rows] == list(marks)
    assert len({row["memory_bytes"] for row in rows}) == 1
    assert len({row["request_bytes"] for row in rows}) == 1
    assert max(rows[-1]["entries"]) == rows[-1]["capacity"], "it was full, and contexts made room for others"
    assert cost.save_and_compare(memory, 8000)["identical"]
