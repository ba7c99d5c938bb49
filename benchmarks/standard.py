"""Compare `auto` with its best fixed setting and with methods of others, in CPU time.

Every case of a line is decoded in every way in one process, twice, in an order that changes from case to case: with
transformers, with `auto`, and with fixed settings. The best setting is chosen on half of the cases and compared on the
other half, and vice versa, so that noise cannot choose it. The file has a row for each way and case, and a last row for
each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lines import Config, Line, Models, Runner, text_lines
from lookahead import LookaheadConfig
from lookahead.bench.rows import Row
from probe import Probe, Turns, Unit, option
from worth import estimate

WAYS: dict[str, Config] = {
    "plain": None,
    "auto": LookaheadConfig(memory="request"),
    **{f"context matches, {size}": LookaheadConfig(preset="context_matches", step_budget=size) for size in (8, 16)},
    **{f"auto, {size}": LookaheadConfig(step_budget=size, memory="request") for size in (4, 8, 16, 32)},
    "suffix decoding, 16": LookaheadConfig(step_budget=16, suffix_factor=16, suffix_min_probability=0.01),
    "RACER, 16": LookaheadConfig(preset="racer", step_budget=16),
}
"""Configurations to compare, by name, with a memory of one request; `None` is transformers' own `generate`."""

FULL = ("Engine, 16 requests", "Engine, 64 requests")
"""Lines without ways of 16 and 32 nodes per row, which take two and three times the time of no drafts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    shared: str = option("../shared", "folder of data and models")
    only: str = option("", "measure only lines with this text in their names")
    cases: int = option(12, "number of cases of a line")
    repeats: int = option(2, "number of runs of each case in each way; the fastest is used")


def measure(line: Line, repeats: int) -> Iterator[Row]:
    """Yield the rows of a line."""
    left_out = ("auto, 16", "auto, 32", "suffix decoding, 16", "RACER, 16") if line.name in FULL else ()
    ways = {name: partial(line.run, config) for name, config in WAYS.items() if name not in left_out}
    turns = Turns(ways, exact="bfloat16" not in line.name, repeats=repeats)
    seconds: dict[str, list[float]] = {}
    for case in line.cases:
        for row in turns.rows(case):
            if row["kind"] == "run":
                seconds.setdefault(row["method"], []).append(row["cpu_seconds"])
            yield {"line": line.name, **row}
    yield {"kind": "line", "line": line.name, "cases": len(line.cases), **held_out(seconds)}


def held_out(seconds: Mapping[str, Sequence[float]]) -> Row:
    """Compare `auto` with the best other way, which is chosen on the other half of the cases.

    Args:
        seconds: Seconds of all cases, by way.

    Returns:
        Names of the best ways, speeds over `plain`, and the ratio of `auto` to the best with its interval.
    """
    times = {name: np.array(values) for name, values in seconds.items()}
    speeds = {name: times["plain"] / values for name, values in times.items()}
    parts = np.arange(len(times["auto"])) % 2
    best_names, best = [], np.zeros(len(parts))
    for part in (0, 1):
        name = max((name for name in seconds if name != "auto"), key=lambda way: np.median(speeds[way][parts != part]))
        best_names.append(name)
        best[parts == part] = times[name][parts == part]
    compared = estimate({str(place): [ratio] for place, ratio in enumerate(best / times["auto"])})
    figures = {
        "best_speed": np.median(times["plain"] / best), "auto_speed": np.median(speeds["auto"]),
        "over_best": 1 + compared.median, "low": 1 + compared.low, "high": 1 + compared.high,
    }  # fmt: skip
    return {
        "best": " / ".join(dict.fromkeys(best_names[::-1])),
        **{name: round(float(x), 4) for name, x in figures.items()},
    }


def probe(options: Options) -> Probe:
    """Make a unit for each line."""
    models = Models(Path(options.shared))
    lines = [line for line in text_lines(models, Runner(models), options.cases) if options.only in line.name]
    return Probe([Unit(line.name, partial(measure, line, options.repeats)) for line in lines])
