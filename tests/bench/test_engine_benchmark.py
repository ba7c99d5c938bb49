"""The engine benchmark: rows that survive an interruption, and tables that say what the rows say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

common = importlib.import_module("common")
engine = importlib.import_module("engine")
write_engine = importlib.import_module("write_engine")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=128, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Where `measure` writes."""
    return tmp_path / "results" / "engine-tiny.jsonl"


@pytest.fixture
def measure(model_folder: Path, results: Path) -> Callable[..., int]:
    """Run the measuring command on the tiny model, with more arguments if given; returns its exit status."""
    results.parent.mkdir()
    arguments = ["--model", str(model_folder), "--output", str(results), "--dtype", "float32", "--repeats", "1"]
    arguments += ["--nodes", "4,16", "--contexts", "8,12", "--variants", "default"]

    def run(*more: str) -> int:
        return int(engine.main([*arguments, *more]))

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Let so many contexts or parts be measured, then act as if Ctrl-C were pressed."""
    left = calls

    def counted(method: Any) -> Any:
        def interrupted(*arguments: Any) -> Any:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return method(*arguments)

        return interrupted

    for name in ("measurement_rows", "parts_row"):
        monkeypatch.setattr(engine.Bench, name, counted(getattr(engine.Bench, name)))


def test_rows_hold_what_was_measured(measure: Callable[..., int], results: Path, tmp_path: Path) -> None:
    assert measure() == 0
    header, *rows = rows_of(results)
    assert header["benchmark"] == "engine"
    assert header["model"]["name"] == "tiny"
    assert header["nodes"] == [1, 4, 16], "one node is always measured"
    assert header["machine"]["instructions"] == common.instruction_sets()
    assert str(tmp_path) not in results.read_text(), "no path of this machine may be in the results"
    assert [(row["kind"], row["method"], row["context"]) for row in rows] == [
        ("measurement", "default", 8),
        ("measurement", "default", 12),
        ("parts", "default", 8),
    ]
    for row in rows[:2]:
        assert [step["nodes"] for step in row["steps"]] == [1, 4, 16]
        assert all(step["seconds"] == step["cpu"] > 0 for step in row["steps"])
        assert row["transformers_forward"]["seconds"] > 0
        assert row["memory_limit"] > 0
    assert rows[2]["steps"] > 0
    assert {"draft", "forward", "verify", "commit"} <= set(rows[2]["seconds"])


def test_finished_run_measures_nothing_again(
    measure: Callable[..., int], results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure() == 0
    before = results.read_text()
    interrupt_after(monkeypatch, 0)
    assert measure() == 0
    assert results.read_text() == before


def test_interrupted_run_goes_on(
    measure: Callable[..., int], results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        assert measure() == 130
    assert "the same command goes on" in " ".join(capsys.readouterr().err.split())
    early = rows_of(results)
    assert len(early) == 2
    with results.open("a") as file:
        file.write('{"kind": "measurement", "id": "con')  # a crash in the middle of a line
    assert measure() == 0
    whole = rows_of(results)
    assert whole[:2] == early
    assert [row["kind"] for row in whole] == ["header", "measurement", "measurement", "parts"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)
        assert measure("--restart") == 130
    assert len(rows_of(results)) == 1


def test_other_settings_are_kept_apart(
    measure: Callable[..., int], results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure("--contexts", "8") == 0
    before = results.read_text()
    assert measure("--contexts", "8", "--nodes", "2") == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "nodes=[1, 4, 16]" in message
    assert "--restart" in message
    assert results.read_text() == before


def test_further_variants_join_the_file(measure: Callable[..., int], results: Path) -> None:
    assert measure("--contexts", "8") == 0
    assert measure("--contexts", "8", "--variants", "default,packed") == 0
    assert [(row["kind"], row["method"]) for row in rows_of(results)[1:]] == [
        ("measurement", "default"),
        ("parts", "default"),
        ("measurement", "packed"),
        ("parts", "packed"),
    ]


def test_plain_steps_leave_the_cache_as_it_was(model_folder: Path) -> None:
    model = engine.load(str(model_folder), "float32", "cpu")
    with torch.no_grad():
        plain = engine.PlainSteps(model, [1, 2, 3, 4, 5])
        for work in (plain.forward, lambda: plain.generate(7)):
            work()
            plain.undo()
            assert plain._cache.get_seq_length() == 4


def test_random_model_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    monkeypatch.setattr(engine, "RANDOM_CONFIG", engine.RANDOM_CONFIG | small)
    state = torch.random.get_rng_state()
    first, second = (engine.load("random", "bfloat16", "cpu").state_dict() for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(weight.dtype == torch.bfloat16 for weight in first.values())


def test_random_model_has_half_a_billion_weights() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**engine.RANDOM_CONFIG))
    assert 450e6 < sum(parameter.numel() for parameter in model.parameters()) < 500e6


@pytest.mark.parametrize("arguments", [["--nodes", "0"], ["--contexts", "a"], ["--variants", "none"]])
def test_refused_arguments(measure: Callable[..., int], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        measure(*arguments)
    assert stop.value.code == 2


# --- the page ---


def header(**changes: Any) -> dict[str, Any]:
    model = {"architecture": "Llama", "parameters": 1234, "vocabulary": 40, "weights": "sha256 0"}
    return {
        "kind": "header",
        "benchmark": "engine",
        "model": {"name": "tiny", "weight_bytes": 2_000_000, **model},
        "dtype": "bfloat16",
        "nodes": [1, 16, 32],
        "machine": {"device": "A Processor", "instructions": ["avx2"], "threads": 1},
        "versions": {"torch": "2"},
        "date": "2000-01-01",
        "command": "python benchmarks/engine.py --model tiny",
    } | changes


def measured(context: int, seconds: dict[int, float], pack: bool = False) -> dict[str, Any]:
    """A row as engine.py would have recorded it: transformers takes 50 ms, generate 60 ms, memory 20 ms."""
    return {
        "kind": "measurement",
        "id": f"context {context}",
        "method": "packed" if pack else "default",
        "config": {"pack_weights": pack},
        "context": context,
        "repeats": 9,
        "clock": "cpu",
        "steps": [{"nodes": nodes, "seconds": time, "wall": time, "cpu": time} for nodes, time in seconds.items()],
        "transformers_forward": {"seconds": 0.05},
        "transformers_generate": {"seconds": 0.06},
        "memory_limit": 0.02,
    }


def parts(pack: bool = False) -> dict[str, Any]:
    row = {"kind": "parts", "method": "packed" if pack else "default", "config": {"pack_weights": pack}}
    return row | {"context": 128, "steps": 20, "mean_nodes": 70.4, "seconds": {"draft": 0.001, "forward": 0.1}}


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "engine-tiny.jsonl") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def written(folder: Path) -> str:
    page = folder / "engine.md"
    assert write_engine.main(["--results", str(folder / "results"), "--output", str(page)]) == 0
    return page.read_text()


def test_page_says_what_the_rows_say(tmp_path: Path) -> None:
    rows = [header(), measured(128, {1: 0.04, 16: 0.044, 32: 0.06}), measured(512, {1: 0.06, 16: 0.072, 32: 0.075})]
    rows += [measured(128, {1: 0.03, 16: 0.03}, pack=True), parts(), parts(pack=True)]
    write_rows(tmp_path / "results", rows)
    page = written(tmp_path)
    assert "A Processor (without AMX; avx2)" in page
    assert "memory was read at 0.1 GB/s" in page
    assert "|  | target | context 128 | context 512 |" in page
    assert "| default engine: one token, over transformers' own step | ≤ 1.00 | **0.80** | 1.20 |" in page
    assert "| default engine: 16 nodes, over one token | ≤ 1.12 | **1.10** | 1.20 |" in page
    assert "| default engine: 32 nodes, over one token | ≤ 1.35 | 1.50 | **1.25** |" in page
    assert "| default engine: 64 nodes, over one token | ≤ 1.75 | – | – |" in page
    assert "| `pack_weights=True`: 16 nodes, over one token | ≤ 1.12 | **1.00** | – |" in page
    # 44 ms: over 40, 50, 60 and 20 ms
    assert "| 16 | 44.00 | 1.10 | 0.88 | 0.73 | 2.20 |" in page
    assert "| `pack_weights=True` | 70 | 1.00 | 100.00 |" in page
    assert header()["command"] in page


def test_amx_is_named(tmp_path: Path) -> None:
    machine = header()["machine"] | {"instructions": ["avx2", "amx_bf16"]}
    write_rows(tmp_path / "results", [header(machine=machine), measured(128, {1: 0.04})])
    assert "A Processor (with AMX; avx2, amx_bf16)" in written(tmp_path)


def test_text_around_the_tables_is_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "results", [header(), measured(128, {1: 0.04})])
    page = tmp_path / "engine.md"
    first, last = importlib.import_module("write_results").marks(write_engine.SCRIPT)
    page.write_text(f"# By hand\n\n{first}\nold tables\n{last}\n\nBy hand as well.\n")
    first = written(tmp_path)
    assert first.startswith("# By hand\n")
    assert first.endswith("By hand as well.\n")
    assert "old tables" not in first
    assert written(tmp_path) == first, "the same rows give the same page"


def test_page_without_marks_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "results", [header(), measured(128, {1: 0.04})])
    page = tmp_path / "engine.md"
    page.write_text("# By hand\n")
    assert write_engine.main(["--results", str(tmp_path / "results"), "--output", str(page)]) == 1
    assert "has no lines" in capsys.readouterr().err
    assert page.read_text() == "# By hand\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no measurements"), ('{"kind": "header"}\n', "not made by benchmarks/engine.py"), ("{\n{}\n", "is no JSON")],
)
def test_page_is_not_written_from_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "engine-bad.jsonl").write_text(text)
    assert write_engine.main(["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
