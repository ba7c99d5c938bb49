"""Summary of runs: differences from `model.generate`, repeated cycles in outputs, and figures of methods.

Greedy text of small models often ends in a cycle: the same line again and again. Inside a cycle every method that
drafts from n-grams looks excellent. So a step compression means little without the share of repeated text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lookahead.bench.rows import Row
from lookahead.config import LookaheadConfig
from lookahead.core.sequence import common_start

MAX_PERIOD = 256
"""Default maximum period of a cycle, in tokens."""

MIN_REPEATED = 8
"""Minimum number of tokens in a cycle that repeat the token one period before them; excludes chance."""


def repeated_cycle_share(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> float:
    """Share of the tokens inside a repeated cycle, from 0 to 1.

    A *run* of period p is a maximal sequence of tokens in which each token, except for the first p, equals the token p
    positions before it. It is a block of p tokens, repeated, with a possibly incomplete last copy. A run is a repeated
    cycle if it has the block at least twice (length >= 2p) and at least `MIN_REPEATED` tokens that repeat an earlier
    one (length >= p + 8). So three equal tokens, an indentation or a doubled word are no cycle, and a doubled sentence
    is one. The share counts each token once, also if several cycles cover it.

    The first copy of the block counts too, so that the rest of the text is free of cycles.

    Args:
        tokens: Token ids of the generated text, without the prompt.
        max_period: Maximum block length. Time is linear in the length of the text times this.
    """
    covered = np.zeros(len(tokens), dtype=bool)
    for start, end, _ in repeated_cycles(tokens, max_period):
        covered[start:end] = True
    return float(covered.mean()) if len(tokens) else 0.0


def tokens_before_cycles(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> int:
    """Number of tokens before the first repeated cycle, which includes its first copy.

    Cycles are defined in `repeated_cycle_share`; in a text without any, all tokens count.
    """
    return min((start for start, _, _ in repeated_cycles(tokens, max_period)), default=len(tokens))


def repeated_cycles(tokens: Sequence[int], max_period: int) -> Iterator[tuple[int, int, int]]:
    """Yield all repeated cycles as (start, end, period), end excluded, by increasing period."""
    ids = np.asarray(tokens, dtype=np.int64)
    for period in range(1, min(max_period, len(ids) // 2) + 1):
        edges = np.flatnonzero(np.diff(ids[period:] == ids[:-period], prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]  # of sequences of equal pairs, ends excluded
        # A sequence of m equal pairs is a run of m + period tokens: 2p and p + 8 require m >= p and m >= 8.
        long_enough = ends - starts >= max(period, MIN_REPEATED)
        for start, end in zip(starts[long_enough].tolist(), ends[long_enough].tolist(), strict=True):
            yield start, end + period, period


@dataclass(frozen=True)
class Difference:
    """Output that differs from the reference.

    `position` is the index of the first differing new token; the length of the shorter output if it is a prefix of the
    other. `is_error` says whether the outputs must be identical.
    """

    row: Row
    position: int
    is_error: bool

    def __str__(self) -> str:
        row = self.row
        return (
            f"{row['method']} on {row['prompt']} ({row['model']}, {row['task']}, pass {row['repeat'] + 1}): differs "
            f"from the reference at new token {self.position}"
        )


def references(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[int]]:
    """Output of plain `model.generate` for each prompt, from the first pass."""
    outputs: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row["reference"]:
            outputs.setdefault(_prompt_of(row), row["output"])
    return outputs


def differences(rows: Sequence[Row], expected: Mapping[Any, list[int]]) -> list[Difference]:
    """Outputs that differ from the reference (`expected`); outputs without a reference are skipped."""
    compared = [(row, expected[_prompt_of(row)]) for row in rows if _prompt_of(row) in expected]
    places = [(row, first_difference(row["output"], text)) for row, text in compared]
    return [Difference(row, place, bool(row["exact"])) for row, place in places if place is not None]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first differing token; `None` for identical texts."""
    place = common_start(output, expected)
    return None if place == len(output) == len(expected) else place


class Ratio(NamedTuple):
    """Speed relative to another method: median and quartiles over prompts."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.lower:.2f}, {self.upper:.2f}]"


class RunSet:
    """Runs of several methods on the same tasks.

    Attributes:
        rows: Rows, in the order of the suite's methods.
        by_method: Rows by name of the method.
        clock: Clock for speeds: `"cpu"` time on CPUs, `"wall"` time on other devices.
        plain: Name of the reference method; `None` if it has not run.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: int(row["order"]))
        self.by_method = grouped(self.rows, lambda row: row["method"])
        self.clock = "cpu" if self.rows[0]["machine"]["type"] == "cpu" else "wall"
        self.plain = next((name for name, group in self.by_method.items() if group[0]["reference"]), None)

    @cached_property
    def references(self) -> dict[tuple[str, str, str], list[int]]:
        """Reference outputs by prompt."""
        return references(self.rows)

    @cached_property
    def methods(self) -> tuple[MethodSummary, ...]:
        """Summaries of the methods, in the order of the suite."""
        return tuple(MethodSummary(group, self) for group in self.by_method.values())

    def engine_base(self, row: Row) -> str | None:
        """Name of the method without drafts that has the same engine settings as a row; `None` without one."""
        settings = _engine_settings(row)
        for method in self.methods:
            if method.preset == "autoregressive" and _engine_settings(method.rows[0]) == settings:
                return method.method
        return None


class MethodSummary:
    """Summary of one method: figures of its `rows`, at least one, compared with other methods in `runs`.

    A figure is `None` without measurements.
    """

    def __init__(self, rows: Sequence[Row], runs: RunSet) -> None:
        self.rows = rows
        self.size = len(rows)
        self.runs = runs
        self.method = str(rows[0]["method"])
        self.settings: Mapping[str, Any] = rows[0]["settings"]["method"]
        self.preset: str | None = self.settings.get("lookahead", {}).get("preset")

    @property
    def step_compression(self) -> float:
        """S, tokens per step over all runs."""
        return _compression(self.rows) or 0.0

    @property
    def before_cycles(self) -> float | None:
        """S up to the first repeated cycle of each output."""
        return _compression(self.rows, "_before_cycles")

    @property
    def cycle_share(self) -> float:
        """Share of all tokens inside a repeated cycle."""
        return float(sum(row["cycle_share"] * row["tokens"] for row in self.rows)) / (_sum(self.rows, "tokens") or 1)

    @property
    def mean_nodes(self) -> float:
        """Nodes per step."""
        nodes = sum(int(row["nodes"]) if "nodes" in row else sum(row["nodes_per_step"]) for row in self.rows)
        return nodes / (_sum(self.rows, "steps") or 1)

    @property
    def time_per_token(self) -> float | None:
        """Milliseconds per token by `runs.clock`, median of the runs."""
        times = [seconds for row in self.rows if (seconds := _seconds(row, self.runs.clock)) is not None]
        return 1000 * median(times) if times else None

    @property
    def over_reference(self) -> Ratio | None:
        """Speed over plain `model.generate`."""
        return self._speed_over(self.runs.plain)

    @property
    def over_plain(self) -> Ratio | None:
        """Speed over decoding without drafts in the same engine."""
        return self._speed_over(self.runs.engine_base(self.rows[0]))

    @property
    def compared(self) -> int:
        """Number of runs with a reference to compare with."""
        return len([row for row in self.rows if _prompt_of(row) in self.runs.references])

    @property
    def same(self) -> int:
        """Number of runs with the output of the reference."""
        return self.compared - len(self.differences)

    @cached_property
    def differences(self) -> list[Difference]:
        """Outputs that differ from the reference."""
        return differences(self.rows, self.runs.references)

    @property
    def identical(self) -> str:
        """Cell text: `yes`, or the number of identical outputs, with NO if they must be identical."""
        if not self.differences:
            return "yes" if self.compared else "not compared"
        return "NO, " * any(difference.is_error for difference in self.differences) + f"{self.same} of {self.compared}"

    def _speed_over(self, base: str | None) -> Ratio | None:
        """Speed per token over another method: the median over passes for each prompt, then quartiles over prompts."""
        at = {run_of(row): row for row in self.runs.by_method.get(base or "", [])}
        ratios: dict[Any, list[float]] = {}
        for row in self.rows:
            seconds, base_seconds = (_seconds(one, self.runs.clock) for one in (row, at.get(run_of(row))))
            if seconds is not None and base_seconds is not None:
                ratios.setdefault(run_of(row)[:-1], []).append(base_seconds / seconds)
        if not ratios:
            return None
        lower, middle, upper = np.percentile([median(values) for values in ratios.values()], [25, 50, 75]).tolist()
        return Ratio(middle, lower, upper)


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], RunSet]:
    """Runs of each model and task, in the order of the rows."""
    return {key: RunSet(group) for key, group in grouped(rows, lambda row: (row["model"], row["task"])).items()}


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group rows by a key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _engine_settings(row: Row) -> tuple[Any, ...]:
    """Engine settings of a row's configuration; the defaults for transformers."""
    config = row["settings"]["method"].get("lookahead", {})
    return tuple(config.get(name, getattr(LookaheadConfig, name)) for name in ("pack_weights", "engine"))


def _prompt_of(row: Row) -> tuple[str, str, str]:
    return (row["model"], row["task"], row["prompt"])


def run_of(row: Row) -> tuple[Any, ...]:
    """Key of a run without the method: model, task, prompt, pass."""
    return (*_prompt_of(row), row["repeat"])


def _seconds(row: Row | None, clock: str) -> float | None:
    return row[f"{clock}_seconds"] / row["tokens"] if row and row["tokens"] else None


def _compression(rows: Sequence[Row], part: str = "") -> float | None:
    steps = _sum(rows, f"steps{part}")
    return _sum(rows, f"tokens{part}") / steps if steps else None


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)
