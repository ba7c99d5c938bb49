"""What pages get from the rows of this repository: tables and plots."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lookahead.bench.rows import named
from lookahead.cli import process
from plots import draw_all
from tables import TableFile

RESULTS = Path(__file__).parent / "results"


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
    """Draw the plots of the pages from the rows of this repository; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks plots", description=draw_plots.__doc__)
    parser.add_argument("folder", type=Path, help="where the plots go, in folders by page")
    folder = parser.parse_args(given).folder
    draw_all(RESULTS, folder)
    notes.print(f"plots written into {folder}", soft_wrap=True)
    return process.OK
