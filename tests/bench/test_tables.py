"""Tables of pages: rows become tables, and every page matches its rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command import main
from lookahead import InvalidArgumentError
from lookahead.bench.scaling_law import ScalingLaw, law_fit
from tables import TableFile, build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ROWS: list[dict[str, Any]] = [
    {"engine": "plain", "size": 1, "seconds": 2.0, "in": {"part": 3, "quartiles": [1, 4]}},
    {"engine": "packed", "size": 1, "seconds": 1.0},
    {"engine": "packed", "size": 8, "seconds": 1.5, "ok": True},
    {"engine": "packed", "size": 8, "seconds": 3.5, "ok": True},
]


@pytest.fixture(scope="module")
def tables() -> TableFile:
    return TableFile(ROOT / "benchmarks" / "tables.toml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_matches_its_rows(page: Path, tables: TableFile) -> None:
    text = page.read_text()
    assert tables.fill(text) == text, "run `make tables RECORD=1`"


def test_every_table_is_on_a_page_and_every_mark_is_whole() -> None:
    text = "\n".join(re.sub(r"(?ms)^```.*?^```$", "", page.read_text()) for page in PAGES)
    marks = re.findall(r"(?m)^<!-- (table: \S+|end)(?:, by tools/\S+)? -->$", text)
    assert marks[1::2] == ["end"] * (len(marks) // 2)
    declared = re.findall(r"(?m)^\[(\S+)\]$", (ROOT / "benchmarks" / "tables.toml").read_text())
    declared.append("fields")  # fields of requests, see tests/tools/test_field_table.py
    assert sorted(declared) == sorted(mark.removeprefix("table: ") for mark in marks[::2])


def test_the_readme_of_the_rows_names_every_file() -> None:
    results = ROOT / "benchmarks" / "results"
    named = set(re.findall(r"`([\w./-]+\.jsonl)`", (results / "README.md").read_text()))
    files = {path.relative_to(results).as_posix().removesuffix(".gz") for path in results.rglob("*") if path.is_file()}
    assert named - {"bench/NAME.jsonl"} == files - {"README.md"}


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ({"format": "{seconds.median:.1f}"}, ["2.0", "1.5"]),
        ({"format": "{seconds.least}-{seconds.most}"}, ["2.0-2.0", "1.0-3.5"]),
        ({"format": "{seconds.sum} of {size.count}"}, ["2.0 of 1", "6.0 of 3"]),
        ({"format": "{size.distinct}"}, ["1", "2"]),
        ({"format": "{in.part} {in.quartiles.1}"}, ["3 4", "–"]),
        ({"format": "{in.quartiles:02}"}, ["01 04", "–"]),
        ({"format": "{ok}"}, ["–", "yes"]),
        ({"format": "{seconds}", "where": {"size": 1}}, ["2.0", "1.0"]),
        ({"format": "{size}", "where": {"seconds": [1.5, 3.5]}}, ["–", "8"]),
        ({"format": "{named:.0f}", "value": "seconds.sum", "scale": 1000}, ["2000", "6000"]),
        ({"format": "{ratio:.2f}", "value": "seconds.mean", "over": {"engine": "plain"}}, ["1.00", "1.00"]),
    ],
)
def test_a_cell_is_the_statistic_that_its_format_names(column: dict[str, Any], cells: list[str]) -> None:
    head, lines = build({"by": ["engine"], "columns": [{"title": "x", **column}]}, ROWS)
    assert head == ["engine", "x"]
    assert lines == [["plain", cells[0]], ["packed", cells[1]]]


def test_lines_are_declared_and_columns_come_from_rows() -> None:
    spec: dict[str, Any] = {
        "head": ["what"],
        "lines": [
            {"cells": ["all"], "format": "{seconds.sum}"},
            {"cells": ["packed"], "where": {"engine": "~^p.*d$"}},
            {"cells": ["none"], "where": {"engine": "other"}},
        ],
        "across": ["size"],
        "names": {"8": "eight"},
        "columns": [{"title": "size {0}", "format": "{seconds.most}"}, {"title": "any", "format": "{seconds.count}"}],
    }
    head, lines = build(spec, ROWS)
    assert head == ["what", "size 1", "size eight", "any"]
    assert lines == [["all", "3.0", "5.0", "8.0"], ["packed", "1.0", "3.5", "3"], ["none", "–", "–", "–"]]


def test_the_law_is_found_again() -> None:
    law = ScalingLaw(alpha=0.4, f=2.5)
    rows = []
    for order, (ngram, window) in enumerate((n, w) for n in (3, 5, 7) for w in (1, 5, 20)):
        config = {"preset": "paper", "pool_from_prompt": False, "ngram_size": ngram}
        config |= {"window_size": window, "guess_set_size": window}
        steps, s = 10**6, law.step_compression(window, ngram)
        row = {"model": "m", "task": "t", "method": str(order), "prompt": "p", "order": order, "reference": False}
        row |= {"tokens": round(s * steps), "steps": steps, "machine": {"type": "cpu"}, "output": []}
        row |= {"tokens_before_cycles": round(s * steps), "steps_before_cycles": steps}
        rows.append({**row, "settings": {"method": {"lookahead": config}}})
    _, (_, whole, before, large) = law_fit(rows)
    assert whole == ["here, whole outputs, 9 sizes", "0.400", "2.500", "0.000"]
    assert before[1:] == whole[1:]
    assert large[0].endswith(", 4 sizes")


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = tmp_path / "tables.toml"
    path.write_text(
        '[speeds]\nrows = "rows.jsonl"\nwhere = { size = 1 }\nby = ["engine"]\n'
        'columns = [{ title = "s", format = "{seconds:.1f}" }]\n'
        '[mixed]\nrows = "rows.jsonl"\nby = ["size"]\ncolumns = [{ title = "s", format = "{seconds}" }]\n'
    )
    return path


def test_tables_are_compared_with_check_and_written_without(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = declared.with_name("page.md")
    page.write_text("# Title\n<!-- table: speeds -->\nold\n<!-- end -->\nSays `<!-- end -->`.\n")
    before = page.read_text()
    assert main(["tables", str(declared), str(page), "--check"]) == 1
    assert f"{page}: not what the rows say" in capsys.readouterr().err.replace("\n", " ").replace("  ", " ")
    assert page.read_text() == before
    assert main(["tables", str(declared), str(page)]) == 0
    table = "| engine | s |\n| --- | ---: |\n| plain | 2.0 |\n| packed | 1.0 |"
    assert page.read_text() == before.replace("old", f"\n{table}\n")
    assert main(["tables", str(declared), str(page), "--check"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[speeds]\nrow = 1\n", "'speeds' cannot be made: KeyError\\('rows'"),
        ("[speeds\n", "cannot read the tables"),
        ('[speeds]\nrows = "none.jsonl"\nby = ["a"]\ncolumns = []\n', "cannot read the results"),
        ('[speeds]\nrows = "rows.jsonl"\nby = ["engine"]\ncolumns = ["none"]\n', "cannot be made: KeyError"),
        ("", "table 'speeds' cannot be made: KeyError\\('speeds'"),
    ],
)
def test_unreadable_or_impossible_tables_are_refused(declared: Path, text: str, message: str) -> None:
    declared.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        TableFile(declared).table("speeds")


def test_a_figure_that_rows_do_not_agree_on_is_refused(declared: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="several values, such as 2.0 and 1.0"):
        TableFile(declared).table("mixed")
