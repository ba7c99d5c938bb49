"""`lookahead tune`: measurement, table, plot, stored result, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.backends.transformers.findings import cost_file, describe_setting, load_costs
from lookahead.bench.tuning import BRANCH, StepBench, clock_of, measure, seconds_of, timings
from lookahead.cli import main
from model_zoo import build

SMALL = ["--context", "24", "--nodes", "4", "--repeats", "2", "--device", "cpu", "--dtype", "float32"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused with one line on stderr, and return that line."""
    assert main(["tune", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# the command


def test_tune_prints_a_table_and_stores_the_curve(
    capsys: pytest.CaptureFixture[str], own_findings: Path, demo: Any
) -> None:
    folder = own_findings / "lookahead-decoding" / "cost"
    options = ["--context", "48"]
    assert main(["tune", *SMALL, *options]) == 0
    out, err = capsys.readouterr()
    assert "over one token" in out
    assert "fit: off by" in out
    assert "\x1b" not in out + err
    (file,) = folder.iterdir()
    assert f"stored in {file}" in err

    setting = describe_setting(demo[0], LookaheadConfig())
    costs = load_costs(setting)
    assert costs is not None, "the decoder finds it under the same setting"
    assert 0 < costs.seconds(1) < 1
    points = json.loads(cost_file(setting).read_text())["details"]["measured"]["points"]
    assert [(point["nodes"], point["context"]) for point in points] == [(1, 24), (4, 24), (1, 48), (4, 48)]


def test_stores_in_the_users_cache(capsys: pytest.CaptureFixture[str], own_findings: Path) -> None:
    assert main(["tune", *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert Path(result["stored"]).is_relative_to(own_findings / "lookahead-decoding")
    assert Path(result["stored"]).exists()
    assert [(point["nodes"], point["repeats"]) for point in result["points"]] == [(1, 2), (4, 2)]
    assert all(point["seconds"] > 0 for point in result["points"])
    assert result["clock"] == "cpu"
    assert result["setting"]["dtype"] == "float32"


def test_stores_nothing_on_request(capsys: pytest.CaptureFixture[str], own_findings: Path) -> None:
    assert main(["tune", *SMALL, "--no-store"]) == 0
    assert "stored" not in capsys.readouterr().err
    assert list(own_findings.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, ["nothing is stored"]),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
            *(2, ["out of memory on cpu while measuring", "--context"]),
        ),
    ],
)
def test_a_measurement_that_is_broken_off_stores_nothing(
    capsys: pytest.CaptureFixture[str], own_findings: Path, error: BaseException, code: int, words: list[str]
) -> None:
    def fail(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and inputs[0].numel() == 24:  # the context
            raise error

    hook = torch.nn.modules.module.register_module_forward_pre_hook(fail)
    try:
        assert main(["tune", *SMALL]) == code
    finally:
        hook.remove()
    message = capsys.readouterr().err
    assert all(word in message for word in words)
    assert list(own_findings.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "0"], ["0 is out of range", "at least 1"]),
        (["--context", "3000"], ["--context 3000", "2048"]),
        (["--nodes", "x"], ["'x' is not a whole number"]),
        (["--nodes", "5000"], ["--nodes 5000", "4096"]),
        (["--model", "nowhere"], ["--model nowhere", "no such folder"]),
    ],
)
def test_tune_names_options_that_cannot_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = refused(capsys, "--no-store", "--device", "cpu", *arguments)
    assert all(word in message for word in words), message


# the measurement


def test_each_size_takes_its_turn(llama: Any) -> None:
    notes: list[str] = []
    measured = measure(llama, [1, 6], [8, 16], repeats=2, progress=notes.append)
    turn = [f"{nodes} nodes, context {context}" for context in (8, 16) for nodes in (1, 6)]
    assert notes == 3 * turn, "one round of warm-up, and two that count"
    assert len(notes) == timings([1, 6], [8, 16], 2)
    assert [(point.nodes, point.context) for point in measured] == [(1, 8), (6, 8), (1, 16), (6, 16)]
    assert all(point.seconds > 0 for point in measured)


def test_trees_equal_a_drafters(llama: Any) -> None:
    with torch.no_grad():
        bench = StepBench(llama, context=12)
        tree = bench.tree(11)
        assert len(tree) == 11
        assert tree.root == 0, "all the text but its last token is in the cache"
        assert all(tree.needs_logits)
        assert max(tree.depths) == BRANCH
        assert sum(parent == 0 for parent in tree.parents) == 3
        bench.step(tree)
        bench.undo()
        assert len(bench.tree(1)) == 1, "the cache is as it was"


def test_contexts_beyond_the_model_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="contexts has 100000"):
        measure(build("gpt2"), [1], [100000], 1)


def test_more_candidates_than_tokens_are_refused(llama: Any) -> None:
    vocabulary = llama.config.vocab_size
    with torch.no_grad(), pytest.raises(InvalidArgumentError, match="node_counts"):
        StepBench(llama, context=4).tree(BRANCH * vocabulary + 2)


def test_cpu_time_only_counts_on_cpus() -> None:
    assert seconds_of(torch.device("cpu"), lambda: sum(range(1000))) > 0
    assert [clock_of(torch.device(name)) for name in ("cpu", "cuda", "meta")] == ["cpu", "wall", "wall"]
