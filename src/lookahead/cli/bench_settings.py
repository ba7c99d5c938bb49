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
class LawSettings(Settings):
    """Settings of `lookahead bench law`."""

    results: list[Path] = argument("RESULTS", "Raw results (JSON lines, also as .gz); several count as one.")
    no_color: bool = no_color_option()
