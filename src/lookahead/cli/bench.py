"""`lookahead bench`: measures methods on tasks and models, and makes tables and plots of what was measured."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from lookahead.bench.comparison import Difference, Reference, differences
from lookahead.bench.machine import describe_machine
from lookahead.bench.measuring import Benchmark, Watcher
from lookahead.bench.plots import check_plots, draw
from lookahead.bench.report import report
from lookahead.bench.results_file import ResultsFile, named, read_files
from lookahead.bench.rows import Row
from lookahead.bench.suite import Suite
from lookahead.bench.summary import RunSet, summarise
from lookahead.bench.tables import NOTHING, TableFile
from lookahead.cli import process
from lookahead.cli.bench_settings import BenchSettings, ReportSettings, TablesSettings
from lookahead.cli.loading import check_device, memory_errors_explained, quiet_libraries
from lookahead.cli.rendering import Consoles, measuring_progress
from lookahead.cli.startup import StartUp
from lookahead.errors import InvalidArgumentError

MOST_SHOWN = 10
"""Differences listed at the end of a run; the report lists more."""


def run(settings: BenchSettings, suite: Suite) -> int:
    """Measure what is missing, print a summary, and return the exit code."""
    consoles = Consoles.create(no_color=settings.no_color)
    device = check_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    StartUp(consoles.notes).compile_drafting()
    process.raise_on_interrupt()
    benchmark = Benchmark(suite, device, settings.limit)
    circumstances: dict[str, Any] = {"machine": describe_machine(device), "versions": process.versions()}
    advice = "smaller models, a smaller max_new_tokens or fewer methods with pack_weights"
    with ResultsFile(settings.output, circumstances, restart=settings.restart) as file:
        try:
            with quiet_libraries(), memory_errors_explained(f"on {device} while measuring", advice):
                _measure(benchmark, file, circumstances, consoles.notes)
        except KeyboardInterrupt:
            consoles.notes.print(f"interrupted; {settings.output} has all finished runs, the same command goes on")
            return process.INTERRUPTED
    for summary in summarise(file.rows):
        consoles.out.print(summary_table(summary))
    return _verdict(differences(file.rows), consoles.notes)


def make_report(settings: ReportSettings) -> int:
    """Write tables and plots of raw results, and return the exit code; without a place the tables are printed."""
    results, page, plots = settings.results, settings.markdown, settings.plots
    consoles = Consoles.create(no_color=settings.no_color)
    if plots is not None:
        check_plots(plots)
    rows = read_files(results)
    if not rows:
        raise InvalidArgumentError(f"{', '.join(map(str, results))}: no results yet; measure with lookahead bench run")
    tables = report(rows)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        with named(page):
            page.write_text(tables, encoding="utf-8")
        consoles.notes.print(f"tables written into {page}")
    if plots is not None:
        for path in draw(rows, plots):
            consoles.notes.print(f"plot written to {path}")
    if page is None and plots is None:
        consoles.out.file.write(tables)
    return _verdict(differences(rows), consoles.notes)


def fill_tables(settings: TablesSettings) -> int:
    """Make the tables of pages anew, or say which of them are old, and return the exit code."""
    notes = Consoles.create(no_color=settings.no_color).notes
    tables, found = TableFile(settings.tables), 0
    for path in settings.pages:
        old = path.read_text(encoding="utf-8")
        new = tables.fill(old)
        if new != old:
            found += 1
            notes.print(f"{path}: {'not what the rows say' if settings.check else 'written'}")
            if not settings.check:
                with named(path):
                    path.write_text(new, encoding="utf-8")
    return process.DIFFERENT if found and settings.check else process.OK


def _measure(benchmark: Benchmark, file: ResultsFile, circumstances: dict[str, Any], notes: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with measuring_progress(notes, *columns) as bar:
        task = bar.add_task("", total=benchmark.runs)

        def starting(what: str) -> None:
            bar.update(task, description=what, refresh=True)

        def finished(row: Row | None) -> None:
            bar.update(task, advance=1, refresh=row is not None)
            if row is not None:
                for found in _new_errors(row, file.rows):
                    notes.print(f"DIFFERENT: {found}")

        benchmark.measure(file, circumstances, Watcher(starting, finished))


def _new_errors(row: Row, rows: list[Row]) -> list[Difference]:
    """What a new row shows: that it differs, or, if it is the reference, that earlier rows of the prompt do."""
    of_prompt = [other for other in rows if all(other[name] == row[name] for name in ("model", "task", "prompt"))]
    reference = Reference(of_prompt)
    news = of_prompt if row["reference"] else [row]
    return [found for found in map(reference.difference, news) if found is not None and found.is_error]


def summary_table(summary: RunSet) -> Table:
    """A line for each method; the report has more columns."""
    clock = "CPU" if summary.clock == "cpu" else "wall"
    table = Table(
        title=f"{summary.model}, {summary.task}",
        caption=f"{clock} speed over transformers' (tf) and over our own plain decoding",
    )
    for title in ("method", "nodes", "S", f"{clock} ms", "over tf", "over own", "cycles", "same"):
        name = title == "method"  # it may be long, and is broken where the figures need the room
        table.add_column(title, justify="left" if name else "right", no_wrap=not name)
    for method in summary.methods:
        time = method.time_per_token
        table.add_row(
            method.method,
            f"{method.mean_nodes:.1f}",
            f"{method.step_compression:.2f}",
            NOTHING if time is None else f"{time:.2f}",
            *(
                NOTHING if ratio is None else f"{ratio.median:.2f}x"
                for ratio in (method.over_reference, method.over_plain)
            ),
            f"{method.cycle_share:.0%}",
            method.identical,
        )
    return table


def _verdict(found: list[Difference], notes: Console) -> int:
    """Say which outputs differ that must not, and return the exit code."""
    errors = [difference for difference in found if difference.is_error]
    for difference in errors[:MOST_SHOWN]:
        notes.print(str(difference))
    if errors:
        notes.print(f"{len(errors)} outputs differ from plain generate although they must not")
    return process.DIFFERENT if errors else process.OK
