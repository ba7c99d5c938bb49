"""`lookahead bench`: measure methods on tasks and models, and fit the scaling law to the results."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lookahead.backends.loading import check_device
from lookahead.bench.measuring import Benchmark
from lookahead.bench.rows import (
    RowsFile,
    describe_machine,
    is_result,
    kept_lines,
    key_of,
    read_lines,
    results,
    versions,
)
from lookahead.bench.scaling_law import law_fit, law_points
from lookahead.bench.suite import Suite
from lookahead.bench.summary import Difference, RunSet, differences, references, summarise
from lookahead.cli.loading import compile_drafting, memory_errors_explained, quiet_libraries
from lookahead.cli.settings import BenchSettings, LawSettings
from lookahead.cli.signals import DIFFERENT, INTERRUPTED, OK, raise_on_interrupt
from lookahead.cli.terminal import Consoles, measuring_progress
from lookahead.errors import InvalidArgumentError

NOTHING = "–"
"""Text of a table cell without a measurement."""

MAX_LISTED = 10
"""Maximum number of differences to list."""


def run(settings: BenchSettings, suite: Suite) -> int:
    """Measure the runs that the output file lacks, print a summary, and return the exit code."""
    consoles = Consoles(no_color=settings.no_color)
    device = check_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    compile_drafting(consoles.notes)
    raise_on_interrupt()
    benchmark = Benchmark(suite, device, settings.limit)
    circumstances: dict[str, Any] = {"machine": describe_machine(device), "versions": versions()}
    advice = "smaller models, a smaller max_new_tokens or fewer methods with pack_weights"
    rows = results(settings.output, kept_lines(settings.output, is_result, restart=settings.restart))
    with RowsFile(settings.output, rows, key_of) as file:
        try:
            with quiet_libraries(), memory_errors_explained(f"on {device} while measuring", advice):
                _measure(benchmark, file, circumstances, consoles.notes)
        except KeyboardInterrupt:
            consoles.notes.print(
                f"interrupted; {settings.output} has all finished runs, run the same command again to resume"
            )
            return INTERRUPTED
    for (model, task), runs in summarise(file.rows).items():
        consoles.out.print(summary_table(runs, f"{model}, {task}"))
    return _verdict(differences(file.rows, references(file.rows)), consoles.notes)


def fit_law(settings: LawSettings) -> int:
    """Print alpha and f of the scaling law for each model and task, and return the exit code."""
    consoles = Consoles(no_color=settings.no_color)
    rows = results(settings.results, read_lines(settings.results))
    if not law_points(rows):
        raise InvalidArgumentError(
            f"{settings.results}: no runs of the paper's method with W = G and n-grams from the window only"
        )
    for (model, task), runs in summarise(rows).items():
        if law_points(runs.rows):
            titles, lines = law_fit(runs.rows)
            table = Table(*titles, title=f"{model}, {task}")
            for line in lines:
                table.add_row(*line)
            consoles.out.print(table)
    return OK


def _measure(benchmark: Benchmark, file: RowsFile, circumstances: dict[str, Any], notes: Console) -> None:
    with measuring_progress(notes) as bar:
        task = bar.add_task("", total=benchmark.runs)

        def starting(what: str) -> None:
            bar.update(task, description=what, refresh=True)

        for row in benchmark.measure(file, circumstances, starting):
            bar.update(task, advance=1, refresh=row is not None)


def summary_table(summary: RunSet, title: str) -> Table:
    """Table with one row per method."""
    clock = "CPU" if summary.clock == "cpu" else "wall"
    table = Table(title=title, caption=f"{clock} speed over transformers' (tf) and over our own plain decoding")
    for title in ("method", "nodes", "S", f"{clock} ms", "over tf", "over own", "cycles", "same"):
        name = title == "method"  # may wrap, as names can be long; figures may not
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


def _verdict(differences: list[Difference], notes: Console) -> int:
    """List outputs that differ although they must be identical, and return the exit code."""
    errors = [difference for difference in differences if difference.is_error]
    for difference in errors[:MAX_LISTED]:
        notes.print(str(difference))
    if errors:
        notes.print(f"{len(errors)} outputs differ from plain generate although they must be identical")
    return DIFFERENT if errors else OK
