"""Summaries, tables and plots of suites' rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from command import main
from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.bench.measuring import steps_within
from lookahead.bench.rows import read_lines, results
from lookahead.bench.suite import MethodSpec
from lookahead.bench.summary import RunSet, differences, first_difference, references, summarise

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def _options(config: LookaheadConfig) -> dict[str, Any]:
    """Return the options as rows name them."""
    options: dict[str, Any] = MethodSpec("", config).settings()["lookahead"]
    return options


METHODS: dict[str, dict[str, Any]] = {
    "plain": {"transformers": {}, "assistant": None},
    "engine": {"lookahead": _options(LookaheadConfig(preset="autoregressive"))},
    "lookup": {"transformers": {"prompt_lookup_num_tokens": 4}, "assistant": None},
    "matches": {"lookahead": _options(LookaheadConfig(preset="context_matches", step_budget=16))},
    "auto": {"lookahead": _options(LookaheadConfig(preset="auto", step_budget=8, memory="process"))},
    "packed": {"lookahead": _options(LookaheadConfig(preset="auto", pack_weights=True, memory="request"))},
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
    """Return a row of `bench run` for a text with a cycle share of one quarter."""
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
    row("auto", "a", [4, 8], 0.6, nodes=8),  # measured first, but not the first method
    row("plain", "a", [1] * 12, 1.2, nodes=1),
    row("engine", "a", [1] * 12, 1.0, nodes=1),
    row("lookup", "a", [6, 6], 0.4),
    row("matches", "a", [12], 0.4, nodes=9),
    row("plain", "b", [1] * 12, 1.2, nodes=1),
    row("engine", "b", [1] * 12, 1.2, nodes=1),
    row("auto", "b", [3, 3, 6], 0.4, nodes=8),
    row("lookup", "b", [6, 6], 0.4),
]


def first(summaries: dict[tuple[str, str], RunSet]) -> RunSet:
    return next(iter(summaries.values()))


def test_a_summary_has_the_figures_of_its_rows() -> None:
    ((names, summary),) = summarise(ROWS).items()
    assert names == ("tiny", "words")
    assert summary.clock == "cpu"
    methods = {method.method: method for method in summary.methods}
    assert list(methods) == ["plain", "engine", "lookup", "matches", "auto"]
    auto = methods["auto"]
    assert auto.size == 2
    assert auto.step_compression == 24 / 5
    assert auto.before_cycles == (4 + 6) / 3
    assert auto.mean_nodes == 8
    assert auto.time_per_token == pytest.approx(1000 * (0.6 + 0.4) / 2 / 12)
    assert auto.over_reference is not None
    assert auto.over_reference.median == pytest.approx((2 + 3) / 2)
    assert auto.over_reference.lower == pytest.approx(2.25)
    assert auto.over_reference.upper == pytest.approx(2.75)
    assert auto.over_plain is not None
    assert auto.over_plain.median == pytest.approx((1 / 0.6 + 3) / 2)
    assert auto.cycle_share == 0.25
    assert (auto.compared, auto.same) == (2, 2)
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
    methods = {method.method: method for method in first(summarise(rows)).methods}
    assert methods["packed"].over_reference is not None
    assert methods["packed"].over_reference.median == (2 + 5) / 2
    assert methods["packed"].over_plain is None, "nothing decoded plainly with packed weights"
    assert methods["packed"].compared == 2, "a prompt that the reference has not run cannot be compared"
    assert methods["auto"].over_reference is None
    assert methods["auto"].time_per_token is None
    assert first(summarise([row("plain", "a", [1], 1.0, device="cuda")])).clock == "wall"


def test_identical_says_whether_a_difference_is_an_error() -> None:
    other = row("engine", "a", [1, 1, 1], 1.0, output=[0, 1, 7])
    rows = [row("plain", "a", [1, 1, 1], 1.0), other]
    assert first(summarise(rows)).methods[1].identical == "NO, 0 of 1"
    assert [str(difference) for difference in differences(rows, references(rows))] == [
        "engine on a (tiny, words, pass 1): differs from the reference at new token 2"
    ]
    other["exact"] = False
    assert first(summarise(rows)).methods[1].identical == "0 of 1"
    assert not differences(rows, references(rows))[0].is_error


@pytest.mark.parametrize(
    ("output", "expected", "index"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [1], 0)],
)
def test_first_difference_is_an_index_or_none(output: list[int], expected: list[int], index: int | None) -> None:
    assert first_difference(output, expected) == index


def test_old_rows_without_nodes_of_each_step_are_summarised() -> None:
    """Old rows have only the total number of nodes."""
    old = {**row("auto", "a", [4, 8], 0.6), "nodes": 16}
    del old["nodes_per_step"]
    auto = first(summarise([row("plain", "a", [1] * 12, 1.2), old])).methods[1]
    assert (auto.mean_nodes, auto.same) == (8, 1)


@pytest.mark.parametrize(
    ("text", "message"), [("{\n", "line 1 is not a JSON"), ('{"kind": "header"}\n', "line 1 is not a result of")]
)
def test_files_of_other_content_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        results(tmp_path / "bad.jsonl", read_lines(tmp_path / "bad.jsonl"))


def test_plots_need_matplotlib_and_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["plots", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    monkeypatch.setattr("plots.find_spec", lambda name: None)
    assert main(["plots", str(tmp_path / "plots")]) == 2
    assert "pip install '.[plot]'" in capsys.readouterr().err


def test_plots_match_the_pages(tmp_path: Path) -> None:
    assert main(["plots", str(tmp_path)]) == 0
    drawn = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg"))
    assert len(drawn) == 6
    for path in drawn:
        words, recorded = (re.findall("<!-- .* -->", (folder / path).read_text()) for folder in (tmp_path, IMAGES))
        assert words == recorded, "run `make plots RECORD=1`"
        assert ("#ffffff" in (tmp_path / path).read_text()) is not path.stem.endswith("-dark")
