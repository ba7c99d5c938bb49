"""Hold `auto` against the best of its parts, line by line, in CPU time or by a table of prices (see `prices.py`).

Every case of a line is decoded in every way in one process, twice in an order that changes from case to case: by
transformers, by `auto`, and by what `auto` could have been set to. Which of these is best is chosen on half of the
cases and compared on the other half, both ways round, so that noise does not choose it. The file has a row for each way
and case and, last, one for each line.
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
from lookahead.errors import InvalidArgumentError
from prices import PRICES, PricedRunner
from probe import Probe, Turns, Unit, option
from worth import estimate

WAYS: dict[str, Config] = {
    "plain": None,
    "auto": LookaheadConfig(),
    **{f"context matches, {size}": LookaheadConfig(preset="context_matches", step_budget=size) for size in (8, 16)},
    **{f"auto, {size}": LookaheadConfig(step_budget=size) for size in (4, 8, 16, 32)},
}
"""What is compared; without a configuration it is transformers' own `generate`."""

FULL = ("Engine, 16 requests", "Engine, 64 requests")
"""Lines without 16 and 32 nodes a row, with which they take twice and three times as long as without drafts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    shared: str = option("../shared", "folder of data and models")
    only: str = option("", "only lines with that in their names")
    cases: int = option(12, "cases of a line")
    repeats: int = option(2, "how often each case is decoded in each way; the fastest counts")
    prices: str = option("", f"instead of CPU time what steps take by a table: {', '.join(PRICES)}")


def measure(line: Line, prices: str, repeats: int) -> Iterator[Row]:
    """The rows of a line."""
    measured = "plain_steps" if prices else "cpu_seconds"
    left_out = ("auto, 16", "auto, 32") if line.name in FULL else ()
    ways = {name: partial(line.run, config) for name, config in WAYS.items() if name not in left_out}
    turns = Turns(ways, exact="bfloat16" not in line.name, repeats=repeats)
    seconds: dict[str, list[float]] = {}
    for case in line.cases:
        for row in turns.rows(case):
            if row["kind"] == "run":
                seconds.setdefault(row["method"], []).append(row["cpu_seconds"])
                row[measured] = row.pop("cpu_seconds")
            yield {"line": line.name, **row}
    yield {"kind": "line", "line": line.name, "cases": len(line.cases), **held_out(seconds)}


def held_out(seconds: Mapping[str, Sequence[float]]) -> Row:
    """How `auto` compares with the best of the others, chosen on the cases that it is not compared on.

    Args:
        seconds: Of each way those of all cases.
    """
    times = {name: np.array(values) for name, values in seconds.items()}
    speeds = {name: times["plain"] / values for name, values in times.items()}
    parts = np.arange(len(times["auto"])) % 2
    chosen, best = [], np.zeros(len(parts))
    for part in (0, 1):
        name = max((name for name in seconds if name != "auto"), key=lambda way: np.median(speeds[way][parts != part]))
        chosen.append(name)
        best[parts == part] = times[name][parts == part]
    compared = estimate({str(place): [ratio] for place, ratio in enumerate(best / times["auto"])})
    figures = {
        "best_speed": np.median(times["plain"] / best), "auto_speed": np.median(speeds["auto"]),
        "over_best": 1 + compared.median, "low": 1 + compared.low, "high": 1 + compared.high,
    }  # fmt: skip
    return {
        "best": " / ".join(dict.fromkeys(chosen[::-1])),
        **{name: round(float(x), 4) for name, x in figures.items()},
    }


def probe(options: Options) -> Probe:
    """The units: each line."""
    models = Models(Path(options.shared))
    if options.prices not in ("", *PRICES):
        raise InvalidArgumentError(f"--prices {options.prices}: must be one of {', '.join(PRICES)}")
    runner = PricedRunner(models, options.prices) if options.prices else Runner(models)
    lines = [line for line in text_lines(models, runner, options.cases) if options.only in line.name]
    if options.prices:  # for all number types, and engines have no prices
        lines = [line for line in lines if not ("bfloat16" in line.name or "Engine" in line.name)]
    repeats = 1 if options.prices else options.repeats  # prices are the same each time
    return Probe([Unit(line.name, partial(measure, line, options.prices, repeats)) for line in lines])
