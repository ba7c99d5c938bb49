"""`python benchmarks replay`: drafts against recorded answers."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lookahead.bench.results_file import RowsFile, difference, kept_lines
from lookahead.bench.rows import Row
from lookahead.cli import process
from lookahead.cli.rendering import measuring_progress
from lookahead.errors import InvalidArgumentError
from replay.methods import SIZES
from replay.recordings import read_recordings, tokenizer_of
from replay.replay import fingerprint, methods_for, replay_rows, text_rows
from whole_numbers import positive


def main(given: Sequence[str], notes: Console) -> int:
    """Draft against recorded answers, as if a model wrote them; returns the exit status.

    No model runs: the recorded token is what it says. RECORDINGS are JSON lines with `id`, `output`, and `prompt` or
    `instruction` and `input`; an input is what is expected. Each method drafts chains and trees of several sizes.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks replay", description=main.__doc__)
    parser.add_argument("recordings", type=Path, nargs="+", help="JSON lines of prompts and recorded answers")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines; what it has is not replayed again")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tekken file, or the folder of a tokenizer (mistral-common's tekken file)"
    )
    parser.add_argument("--limit", type=positive, help="only the first so many recordings of each file")
    parser.add_argument("--restart", action="store_true", help="throw the rows of an existing file away")
    settings = parser.parse_args(given)
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
    with RowsFile(settings.output, complete or [header], _unit) as file, measuring_progress(notes) as bar:
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
                    notes.print(f"interrupted; {settings.output} has what is finished, the same command goes on")
                    return process.INTERRUPTED
            bar.update(work, advance=1, refresh=True)
        for task in tasks:
            Console().print(_summary(task, [row for row in file.rows if row.get("task") == task]))
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
