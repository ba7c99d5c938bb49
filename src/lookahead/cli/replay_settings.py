"""Settings of `lookahead bench replay`."""
# ruff: noqa: RUF009, as `option` and `argument` make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookahead.cli.options import OUTPUT, SOURCE, Settings, argument, option, positive_whole_number


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Settings of `lookahead bench replay`."""

    recordings: list[Path] = argument("RECORDINGS", "JSON lines of prompts and recorded answers.")
    output: Path = option(
        "--output -o FILE",
        OUTPUT,
        "Rows as JSON lines; what the file has already is not replayed again.",
        default=...,
    )
    tokenizer: Path | None = option(
        "--tokenizer PATH",
        SOURCE,
        "A tekken file, or the folder of a tokenizer.",
        shown="the tekken file of mistral-common",
    )
    limit: int | None = option(
        "--limit", SOURCE, "Take only the first so many recordings of each file.", positive_whole_number
    )
    restart: bool = option("--restart", OUTPUT, "Throw earlier rows in the file away.", default=False)
    no_color: bool = option("--no-color", OUTPUT, "Print without colours.", default=False)
