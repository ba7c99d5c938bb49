"""`python benchmarks report`: tables and plots that say what the rows say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from command import main
from lookahead import LookaheadConfig
from lookahead.bench.rows import read_files, read_rows, steps_within
from lookahead.bench.suite import MethodSpec
from lookahead.bench.summary import RunSet, first_difference, summarise
from pages import report
from plots import best_of_families, draw


def _options(config: LookaheadConfig) -> dict[str, Any]:
    """As rows name them."""
    options: dict[str, Any] = MethodSpec("", config).settings()["lookahead"]
    return options


METHODS: dict[str, dict[str, Any]] = {
    "plain": {"transformers": {}, "assistant": None},
    "engine": {"lookahead": _options(LookaheadConfig(preset="autoregressive"))},
    "lookup": {"transformers": {"prompt_lookup_num_tokens": 4}, "assistant": None},
    "matches": {"lookahead": _options(LookaheadConfig(preset="context_matches", step_budget=16))},
    "auto": {"lookahead": _options(LookaheadConfig(preset="auto", step_budget=8, memory="process"))},
    "packed": {"lookahead": _options(LookaheadConfig(preset="auto", pack_weights=True))},
}


def row(
    method: str,
    prompt: str,
    lengths: list[int],
    cpu: float,
    *,
    task: str = "words",
    repeat: int = 0,
    nodes: int = 4,
    output: list[int] | None = None,
    exact: bool = True,
    sampling: dict[str, Any] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """A row as `bench run` would have written it, of a text of which a quarter lies in a cycle."""
    tokens = sum(lengths)
    early = steps_within(lengths, tokens // 2)
    return {
        "model": "tiny",
        "task": task,
        "method": method,
        "prompt": prompt,
        "repeat": repeat,
        "order": list(METHODS).index(method),
        "reference": method == "plain",
        "exact": exact,
        "tokens": tokens,
        "steps": len(lengths),
        "cpu_seconds": cpu,
        "wall_seconds": 2 * cpu,
        "cycle_share": 0.25,
        "tokens_before_cycles": sum(early),
        "steps_before_cycles": len(early),
        "nodes_per_step": [nodes] * len(lengths),
        "accepted_lengths": lengths,
        "output": list(range(tokens)) if output is None else output,
        "settings": {
            "model": {"architecture": "Llama", "parameters": 1_500_000, "identity": "abc", "dtype": "float32"},
            "task": {"data": "words.jsonl", "max_new_tokens": 12, "sampling": sampling},
            "method": {"name": method, **METHODS[method]},
        },
        "machine": {"type": device, "device": "A Processor", "threads": 1},
        "versions": {"torch": "2"},
    }


ROWS = [
    row("auto", "a", [4, 8], 0.6, nodes=8),  # done first, yet not the first method
    row("plain", "a", [1] * 12, 1.2, nodes=1),
    row("engine", "a", [1] * 12, 1.0, nodes=1),
    row("lookup", "a", [6, 6], 0.4),
    row("matches", "a", [12], 0.4, nodes=9),
    row("plain", "b", [1] * 12, 1.2, nodes=1),
    row("engine", "b", [1] * 12, 1.2, nodes=1),
    row("auto", "b", [3, 3, 6], 0.4, nodes=8),
    row("lookup", "b", [6, 6], 0.4),
]


def test_a_summary_has_the_figures_of_its_rows() -> None:
    (summary,) = summarise(ROWS)
    assert (summary.model, summary.task) == ("tiny", "words")
    assert summary.clock == "cpu"
    methods = {method.method: method for method in summary.methods}
    assert list(methods) == ["plain", "engine", "lookup", "matches", "auto"]
    auto = methods["auto"]
    assert (auto.size, auto.prompts) == (2, {"a", "b"})
    assert auto.step_compression == 24 / 5
    assert (auto.lowest, auto.highest) == (4, 6)
    assert auto.before_cycles == (4 + 6) / 3
    assert (auto.mean_nodes, auto.most_nodes) == (8, 8)
    assert auto.cpu_per_token == pytest.approx(1000 * (0.6 + 0.4) / 2 / 12)
    assert auto.time_over_reference == pytest.approx((0.6 + 0.4) / (1.2 + 1.2))
    assert auto.over_reference is not None
    assert auto.over_reference.median == pytest.approx((2 + 3) / 2)
    assert auto.over_reference.lower == pytest.approx(2.25)
    assert auto.over_reference.upper == pytest.approx(2.75)
    assert auto.over_plain is not None
    assert auto.over_plain.median == pytest.approx((1 / 0.6 + 3) / 2)
    assert auto.cycle_share == 0.25
    assert (auto.compared, auto.different) == (2, 0)
    assert methods["matches"].size == 1


def test_speed_is_of_the_same_pass_and_the_right_engine() -> None:
    rows = [
        row("plain", "a", [1], 1.0),
        row("plain", "a", [1], 5.0, repeat=1),
        row("engine", "a", [1], 1.0),
        row("packed", "a", [1], 0.5),
        row("packed", "a", [1], 1.0, repeat=1),
        row("packed", "only here", [1], 0.1),
        row("auto", "a", [], 0.1),
    ]
    methods = {method.method: method for method in summarise(rows)[0].methods}
    assert methods["packed"].over_reference is not None
    assert methods["packed"].over_reference.median == (2 + 5) / 2
    assert methods["packed"].over_plain is None, "nothing decoded plainly with packed weights"
    assert methods["packed"].compared == 2, "a prompt that the reference has not run cannot be compared"
    assert methods["auto"].over_reference is None
    assert methods["auto"].cpu_per_token is None
    assert summarise([row("plain", "a", [1], 1.0, device="cuda")])[0].clock == "wall"


def test_a_report_has_tables_of_models_tasks_and_methods() -> None:
    tables = report(ROWS)
    assert "## tiny" in tables
    assert "### words" in tables
    assert "| tiny | Llama | 1,500,000 | `abc` | float32 | A Processor | 1 | – |" in tables
    assert "| words | words.jsonl | 2 | 1 | 12 | – | – | – |" in tables
    figures = "8.0 | 4.80 | 3.33 | 41.67 | 83.33 | 2.50x [2.25, 2.75] | 2.33x [2.00, 2.67] | 25% | yes |"
    assert f"| auto | {figures}" in tables
    assert "| words | auto | 8 | 25% | 4.80 | lookup | 6.00 | 0.80x |" in tables, "the matches send 9 nodes"
    assert "Outputs that differ" not in tables
    fewer = [row for row in ROWS if (row["method"], row["prompt"]) != ("lookup", "b")]
    assert "| words | auto | 8 | 25% | 4.80 | – | – | – |" in report(fewer), "other prompts are no comparison"
    drawn = {"task": "drawn", "sampling": {"temperature": 0.8, "top_k": 5, "top_p": 0.9}}
    sampled = [row("plain", "a", [1], 1.0, **drawn), row("plain", "a", [1], 1.0, repeat=1, **drawn), *ROWS]
    assert "| drawn | words.jsonl | 1 | 2 | 12 | 0.8 | 5 | 0.9 |" in report(sampled)


def test_differences_are_listed() -> None:
    other = row("engine", "a", [1, 1, 1], 1.0, output=[0, 1, 7])
    rows = [row("plain", "a", [1, 1, 1], 1.0), other]
    assert "| 0% |" not in report(rows)
    assert "NO, 0 of 1" in report(rows)
    assert "- engine on a (tiny, words, pass 1): differs from the reference at new token 2" in report(rows)
    other["exact"] = False
    assert "| 0 of 1 |" in report(rows)
    assert "Outputs that differ" not in report(rows)
    twice = [row("plain", "a", [1], 1.0), row("plain", "a", [1], 1.0, repeat=1, output=[3])]
    assert "Outputs that differ although they must not: 1." in report(twice)


@pytest.mark.parametrize(
    ("output", "expected", "index"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [1], 0)],
)
def test_first_difference(output: list[int], expected: list[int], index: int | None) -> None:
    assert first_difference(output, expected) == index


def test_rows_that_only_count_steps() -> None:
    """Old rows know how many nodes there were in all, and how many steps gave how many tokens; some were not timed."""
    old = {**row("auto", "a", [4, 8], 0.6), "nodes": 16, "accepted_lengths": {"4": 1, "8": 1}, "cpu_seconds": None}
    del old["nodes_per_step"]
    (summary,) = summarise([row("plain", "a", [1] * 12, 1.2), old])
    auto = summary.methods[1]
    assert (auto.mean_nodes, auto.different) == (8, 0)
    assert auto.cpu_per_token is auto.over_reference is auto.time_over_reference is None


def test_report_reads_several_files_and_writes_page_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(json.dumps(each) + "\n" for each in ROWS)
    results, rest = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    results.write_text(text)
    more = [row(method, "a", [1, 2], 1.0, task="other words") for method in ("plain", "auto")]
    rest.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in more).encode()))
    assert read_rows(rest) == more
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().out == report(ROWS)
    page, plots = tmp_path / "docs" / "page.md", tmp_path / "plots"
    assert main(["report", str(results), str(rest), "--markdown", str(page), "--plots", str(plots)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert page.read_text() == report([*ROWS, *more])
    assert {path.name for path in plots.iterdir()} == {"tiny-S.svg", "tiny-speed.svg"}
    for path in plots.iterdir():
        assert "prefers-color-scheme: dark" in path.read_text()
        assert f"plot written to {path}" in err
    results.write_text(text.replace("[0, 1, 2", "[5, 1, 2", 1))
    assert main(["report", str(results)]) == 1
    assert "auto on a" in capsys.readouterr().err


def test_files_that_do_not_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, elsewhere = (tmp_path / f"{name}.jsonl" for name in "abc")
    first.write_text(json.dumps(row("plain", "a", [1, 1], 1.0)) + "\n")
    again.write_text(json.dumps(row("plain", "a", [1, 1], 3.0)) + "\n")
    assert [each["cpu_seconds"] for each in read_files([first, again])] == [3.0]
    elsewhere.write_text(again.read_text().replace("A Processor", "Another"))
    assert main(["report", str(first), str(elsewhere)]) == 0, "the last one counts"
    elsewhere.write_text(elsewhere.read_text().replace('"prompt": "a"', '"prompt": "b"'))
    assert main(["report", str(first), str(elsewhere)]) == 2
    assert "machine: device: 'A Processor' then, 'Another' now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no results yet"), ("{\n", "line 1 is no JSON"), ('{"kind": "header"}\n', "line 1 is no result of")],
)
def test_files_that_hold_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    assert main(["report", str(tmp_path / "bad.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_plots_need_matplotlib_and_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["report", str(file), "--plots", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err
    monkeypatch.setattr("plots.find_spec", lambda name: None)
    assert main(["report", str(file), "--plots", str(tmp_path / "plots")]) == 2
    assert "pip install 'lookahead-decoding[plot]'" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read the results" in capsys.readouterr().err


def test_plots_have_one_message_each(tmp_path: Path) -> None:
    """However many methods and tasks there are: eight bars at most, the highest first, and the same file again."""
    methods = [row("lookup", "a", [2 + number] * 4, 1.0) | {"method": f"method {number}"} for number in range(12)]
    rows = [row("plain", "a", [1] * 8, 1.0), *methods]
    tasks = [row("auto", "a", [1 + number, 2], 1.0, task=f"task {number}") for number in range(11)]
    for index, each in enumerate((rows, tasks)):
        first, again = (draw(each, tmp_path / f"{index}{time}") for time in "ab")
        assert [path.read_text() for path in first] == [path.read_text() for path in again]
    runs = RunSet(rows)
    best = best_of_families(runs, lambda method: method.step_compression)
    assert [method.method for method in best] == [f"method {number}" for number in range(11, 3, -1)]
