"""What pages get from rows: the report of a benchmark, tables, and plots.

python benchmarks report demo.jsonl --markdown tables.md --plots plots
python benchmarks tables benchmarks/tables.toml README.md docs/*.md --check
python benchmarks plots docs/images
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lookahead.bench.rows import Row, named, read_files
from lookahead.bench.summary import MOST_SHOWN, differences, grouped
from lookahead.cli import process
from lookahead.errors import InvalidArgumentError
from plots import check_plots, draw, draw_kinds_of_work, draw_load
from tables import TableFile, best_published, build, markdown

RESULTS = Path(__file__).parent / "results"

MOST_DIFFERENCES = 20
"""Differences that a report lists one by one for a model."""

_MODEL = ("architecture", "parameters", "weights", "type", "device", "threads", "versions")
_TASKS = ("data", "prompts", "passes", "new tokens", "temperature", "top-k", "top-p")
_METHODS = ("nodes", "S", "before", "cpu", "wall", "speed", "engine speed", "cycles", "identical")


def report(rows: Sequence[Row]) -> str:
    """All tables of a suite, and the outputs that differ although they must not."""
    lines = []
    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        tables = {
            f"## {model}": build({"by": ["model"], "columns": _MODEL}, of_model),
            "### Tasks": build({"by": ["task"], "columns": _TASKS}, of_model),
        }
        for task, of_task in grouped(of_model, lambda row: row["task"]).items():
            tables[f"### {task}"] = build({"by": ["method"], "columns": _METHODS}, of_task)
        tables["### S at equal numbers of nodes"] = best_published(of_model)
        for title, table in tables.items():
            lines += [title, "", *markdown(*table), ""] if table[1] else []
        errors = [found for found in differences(rows) if found.is_error and found.row["model"] == model]
        if errors:
            lines += [f"**Outputs that differ although they must not: {len(errors)}.**", ""]
            lines += [f"- {difference}" for difference in errors[:MOST_DIFFERENCES]]
            lines += [*[f"- and {len(errors) - MOST_DIFFERENCES} more"] * (len(errors) > MOST_DIFFERENCES), ""]
    return "\n".join(lines)


def make_report(given: Sequence[str], notes: Console) -> int:
    """Tables and plots of the rows that `lookahead bench run` wrote; returns the exit status.

    It is 1 if an output differs from plain decoding that must not.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks report", description=make_report.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines, also as .gz; several count as one")
    parser.add_argument("--markdown", type=Path, help="write the tables into this file (to standard output)")
    parser.add_argument("--plots", type=Path, help="draw plots as SVG files into this folder (none)")
    options = parser.parse_args(given)
    if options.plots is not None:
        check_plots(options.plots)
    rows = read_files(options.results)
    if not rows:
        names = ", ".join(map(str, options.results))
        raise InvalidArgumentError(f"{names}: no results yet; measure with lookahead bench run")
    tables = report(rows)
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        with named(options.markdown):
            options.markdown.write_text(tables, encoding="utf-8")
        notes.print(f"tables written into {options.markdown}", soft_wrap=True)
    elif options.plots is None:
        print(tables, end="")
    for path in () if options.plots is None else draw(rows, options.plots):
        notes.print(f"plot written to {path}", soft_wrap=True)
    errors = [difference for difference in differences(rows) if difference.is_error]
    for difference in errors[:MOST_SHOWN]:
        notes.print(str(difference), markup=False)
    return process.DIFFERENT if errors else process.OK


def fill_tables(given: Sequence[str], notes: Console) -> int:
    """Make the tables of Markdown pages anew from rows; returns the exit status.

    A table lies between `<!-- table: NAME -->` and `<!-- end -->`; TABLES says which rows, lines and columns it has.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks tables", description=fill_tables.__doc__)
    parser.add_argument("tables", type=Path, help="TOML file that declares tables")
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files that hold them")
    parser.add_argument("--check", action="store_true", help="change nothing; the exit status is 1 if a table is old")
    options = parser.parse_args(given)
    tables, old_pages = TableFile(options.tables), 0
    for path in options.pages:
        old = path.read_text(encoding="utf-8")
        new = tables.fill(old)
        if new == old:
            continue
        old_pages += 1
        notes.print(f"{path}: {'not what the rows say' if options.check else 'written'}", soft_wrap=True)
        if not options.check:
            with named(path):
                path.write_text(new, encoding="utf-8")
    return process.DIFFERENT if old_pages and options.check else process.OK


def draw_plots(given: Sequence[str], notes: Console) -> int:
    """Draw the plots of replay and the server from the rows of this repository; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks plots", description=draw_plots.__doc__)
    parser.add_argument("folder", type=Path, help="where the folders replay and server are made")
    folder = parser.parse_args(given).folder
    check_plots(folder)
    draw_kinds_of_work(RESULTS / "replay.jsonl", folder / "replay" / "kinds-of-work.svg")
    draw_load(RESULTS / "load.jsonl", folder / "server" / "load.svg")
    notes.print(f"plots written into {folder}", soft_wrap=True)
    return process.OK
