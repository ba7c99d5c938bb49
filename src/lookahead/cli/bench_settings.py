"""What the options of the `bench` commands add up to."""
# ruff: noqa: RUF009, as `option` and `argument` make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookahead.cli.options import OUTPUT, RUN, SOURCE, Settings, argument, option, positive_whole_number
from lookahead.cli.settings import device_option, no_color_option


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Settings of `lookahead bench run`."""

    suite: Path = argument("SUITE", "TOML file that names models, tasks and methods.")
    output: Path = option(
        "--output -o FILE",
        OUTPUT,
        "Raw results as JSON lines; what the file has already is not measured again.",
        default=...,
    )
    data: Path | None = option("--data FOLDER", SOURCE, "Folder of the prompt files.", shown="the folder of SUITE")
    limit: int | None = option(
        "--limit", SOURCE, "Take only the first so many prompts of each task.", positive_whole_number
    )
    restart: bool = option("--restart", OUTPUT, "Throw earlier results in the file away.", default=False)
    device: str | None = device_option()
    threads: int | None = option(
        "--threads", RUN, "CPU threads.", positive_whole_number, shown="as many as torch takes"
    )
    no_color: bool = no_color_option()


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Settings of `lookahead bench report`."""

    results: list[Path] = argument("RESULTS", "Raw results (JSON lines, also as .gz); several count as one.")
    markdown: Path | None = option(
        "--markdown FILE",
        OUTPUT,
        "Write the tables into this file.",
        shown="to standard output",
    )
    plots: Path | None = option("--plots FOLDER", OUTPUT, "Draw plots as SVG files into this folder.", shown="no plots")
    no_color: bool = no_color_option()


@dataclass(frozen=True, kw_only=True)
class TablesSettings(Settings):
    """Settings of `lookahead bench tables`."""

    tables: Path = argument("TABLES", "TOML file that declares tables.")
    pages: list[Path] = argument("PAGES", "Markdown files that hold them.")
    check: bool = option("--check", OUTPUT, "Change nothing; the exit code is 1 if a table is old.", default=False)
    no_color: bool = no_color_option()
