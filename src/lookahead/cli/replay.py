"""`lookahead bench replay`: drafts against recorded answers."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from lookahead.bench.replay.methods import SIZES
from lookahead.bench.replay.recordings import read_recordings, tokenizer_of
from lookahead.bench.replay.replay import fingerprint, methods_for, replay_rows, text_rows
from lookahead.bench.results_file import RowsFile, difference, kept_lines
from lookahead.bench.rows import Row
from lookahead.cli import process
from lookahead.cli.rendering import Consoles, measuring_progress
from lookahead.cli.replay_settings import ReplaySettings
from lookahead.errors import InvalidArgumentError


def run(settings: ReplaySettings) -> int:
    """Replay what the file lacks, print S of each method, and return the exit code."""
    consoles = Consoles.create(no_color=settings.no_color)
    tokenizer, encode = tokenizer_of(settings.tokenizer)
    tasks = {path.stem: read_recordings(path, encode, settings.limit) for path in settings.recordings}
    header: Row = {"kind": "header", "tokenizer": tokenizer, "versions": process.versions()}
    header["files"] = {path.stem: fingerprint(path) for path in settings.recordings}
    kept = kept_lines(settings.output, restart=settings.restart)
    if kept and kept[0] != header:
        raise InvalidArgumentError(
            f"{settings.output} was made in another way ({difference(kept[0], header)}); choose another --output, or "
            "begin anew with --restart"
        )
    process.raise_on_interrupt()
    units = [(task, method) for task, recordings in tasks.items() for method in methods_for(recordings)]
    counts = Counter(_unit(row) for row in kept)
    lengths = {task: len(recordings) for task, recordings in tasks.items()}
    complete = [row for row in kept if counts[_unit(row)] == lengths.get(row.get("task", ""), 1)]
    with RowsFile(settings.output, complete or [header], _unit) as file, measuring_progress(consoles.notes) as bar:
        work = bar.add_task("", total=len(units))
        for task, recordings in tasks.items():
            if ("text", task, None, None) not in file:
                file.append(*text_rows(task, recordings))
        for task, method in units:
            bar.update(work, description=f"{task}, {method.name}", refresh=True)
            if ("replay", task, method.name, method.across) not in file:
                try:
                    file.append(*list(replay_rows(task, tasks[task], method)))
                except KeyboardInterrupt:
                    consoles.notes.print(
                        f"interrupted; {settings.output} has what is finished, the same command goes on"
                    )
                    return process.INTERRUPTED
            bar.update(work, advance=1, refresh=True)
        for task in tasks:
            consoles.out.print(_summary(task, [row for row in file.rows if row.get("task") == task]))
    return process.OK


def _unit(row: Row) -> tuple[str | None, ...]:
    """What a row was made with: rows of a unit are there together, or made again."""
    return tuple(row.get(key) for key in ("kind", "task", "method", "across"))


def _summary(task: str, rows: list[Row]) -> Table:
    table = Table(title=f"S on {task}")
    table.add_column("method")
    table.add_column("memory")
    for size in SIZES:
        table.add_column(size.name, justify="right")
    replayed: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row["kind"] == "replay" and row["drafts"][0]["size"] == SIZES[0].name:
            replayed.setdefault((row["method"], row["across"]), []).append(row)
    for (method, across), own in replayed.items():
        tokens = sum(row["tokens"] for row in own)
        steps = [sum(row["drafts"][place]["steps"] for row in own) for place in range(len(SIZES))]
        table.add_row(method, "file" if across else "request", *(f"{tokens / each:.2f}" for each in steps))
    return table
