"""What runs come to: whether outputs are those of `model.generate`, how far they repeat themselves, and figures of one
method.

Greedy text of small models often ends in a cycle: the same line again and again. Inside a cycle every method that
drafts from n-grams looks excellent, so a measured step compression means little without the share of the text that was
repeated.
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
"""Longest cycle that is looked for by default: every cycle that fits twice into 512 tokens."""

MIN_REPEATED = 8
"""Fewest tokens that must repeat the token one period before them, so that chance does not count."""


def repeated_cycle_share(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> float:
    """Share of the tokens that lie inside a repeated cycle, from 0 to 1.

    A *run* of period p is a longest possible stretch of tokens in which each token, but for the first p,
    equals the one p places before it; that is, a block of p tokens said over and over, where the last copy
    may be cut short. A run is a repeated cycle when it holds the block at least twice (length >= 2p) and at
    least `MIN_REPEATED` of its tokens repeat an earlier one (length >= p + 8): so three equal tokens, the
    spaces of an indentation or a doubled word are no cycle, and a doubled sentence is one. The share is that
    of the tokens covered by one cycle or several.

    The first copy of the block counts as well. It was new when it was written, but the question is which text
    is to be kept apart from the rest, and there the strict reading is the safe one: what is left is free of
    cycles altogether, and a text called "little repeated" is so on any reading.

    Args:
        tokens: Token ids, of the generated text alone.
        max_period: Longest block that is looked for, so that time is linear in the length of the text.
    """
    covered = np.zeros(len(tokens), dtype=bool)
    for start, end, _ in repeated_cycles(tokens, max_period):
        covered[start:end] = True
    return float(covered.mean()) if len(tokens) else 0.0


def tokens_before_cycles(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> int:
    """How many tokens come before the first repeated cycle, its first copy counted as part of it.

    Cycles are those of `repeated_cycle_share`; in a text without any, all tokens count.
    """
    return min((start for start, _, _ in repeated_cycles(tokens, max_period)), default=len(tokens))


def repeated_cycles(tokens: Sequence[int], max_period: int) -> Iterator[tuple[int, int, int]]:
    """All repeated cycles as (start, end, period), end excluded, from the shortest period to the longest."""
    ids = np.asarray(tokens, dtype=np.int64)
    for period in range(1, min(max_period, len(ids) // 2) + 1):
        edges = np.flatnonzero(np.diff(ids[period:] == ids[:-period], prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]  # of the stretches of equal pairs, ends excluded
        # A stretch of m equal pairs is a run of m + period tokens: 2p and p + 8 ask for m >= p and m >= 8.
        long_enough = ends - starts >= max(period, MIN_REPEATED)
        for start, end in zip(starts[long_enough].tolist(), ends[long_enough].tolist(), strict=True):
            yield start, end + period, period


@dataclass(frozen=True)
class Difference:
    """An output that is not the reference's.

    Attributes:
        row: The run.
        position: The first new token that differs, counted from 0; the length of the shorter text if it is the
            beginning of the other.
        is_error: Whether they had to be identical.
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
    """The output of plain `model.generate` for each prompt; that of the first pass."""
    outputs: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row["reference"]:
            outputs.setdefault(_prompt_of(row), row["output"])
    return outputs


def differences(rows: Sequence[Row], expected: Mapping[Any, list[int]]) -> list[Difference]:
    """The outputs that are not the reference's; those without a reference are not compared.

    Args:
        expected: See `references`.
    """
    compared = [(row, expected[_prompt_of(row)]) for row in rows if _prompt_of(row) in expected]
    places = [(row, first_difference(row["output"], text)) for row, text in compared]
    return [Difference(row, place, bool(row["exact"])) for row, place in places if place is not None]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs; `None` for identical texts."""
    place = common_start(output, expected)
    return None if place == len(output) == len(expected) else place


class Ratio(NamedTuple):
    """How many times as fast as another method: median and quartiles of the prompts' ratios."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.lower:.2f}, {self.upper:.2f}]"


class RunSet:
    """Runs of several methods on the same tasks.

    Attributes:
        rows: The runs, in the order of the suite's methods.
        by_method: They again, by the method's name.
        clock: Whether speeds are of `"cpu"` or `"wall"` time: CPU time on CPUs, wall time on other devices.
        plain: Name of the reference method, if it has run.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: int(row["order"]))
        self.by_method = grouped(self.rows, lambda row: row["method"])
        self.clock = "cpu" if self.rows[0]["machine"]["type"] == "cpu" else "wall"
        self.plain = next((name for name, group in self.by_method.items() if group[0]["reference"]), None)

    @cached_property
    def references(self) -> dict[tuple[str, str, str], list[int]]:
        """The outputs to compare with, by prompt."""
        return references(self.rows)

    @cached_property
    def methods(self) -> tuple[MethodSummary, ...]:
        """The methods, in the order of the suite."""
        return tuple(MethodSummary(group, self) for group in self.by_method.values())

    def engine_base(self, row: Row) -> str | None:
        """The method that decodes plainly through the engine set as for this row; transformers has it as it is."""
        wanted = _engine_settings(row)
        for method in self.methods:
            if method.preset == "autoregressive" and _engine_settings(method.rows[0]) == wanted:
                return method.method
        return None


class MethodSummary:
    """One method, on the runs in `rows`, of which there is one at least, compared with those of others in `runs`.

    A figure is `None` where nothing was measured that it could come from.
    """

    def __init__(self, rows: Sequence[Row], runs: RunSet) -> None:
        self.rows, self.size, self.runs = rows, len(rows), runs
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
        """Share of all tokens that lie in a repeated cycle."""
        return float(sum(row["cycle_share"] * row["tokens"] for row in self.rows)) / (_sum(self.rows, "tokens") or 1)

    @property
    def mean_nodes(self) -> float:
        """Nodes per step."""
        nodes = sum(int(row["nodes"]) if "nodes" in row else sum(row["nodes_per_step"]) for row in self.rows)
        return nodes / (_sum(self.rows, "steps") or 1)

    @property
    def time_per_token(self) -> float | None:
        """Milliseconds per token by the clock that counts, median of the runs."""
        times = [seconds for row in self.rows if (seconds := _seconds(row, self.runs.clock)) is not None]
        return 1000 * median(times) if times else None

    @property
    def over_reference(self) -> Ratio | None:
        """Speed over plain `model.generate`."""
        return self._over(self.runs.plain)

    @property
    def over_plain(self) -> Ratio | None:
        """Speed over plain decoding through the same engine."""
        return self._over(self.runs.engine_base(self.rows[0]))

    @property
    def compared(self) -> int:
        """Runs whose output was compared with the reference's."""
        return len([row for row in self.rows if _prompt_of(row) in self.runs.references])

    @property
    def same(self) -> int:
        """Those of them whose output is the reference's."""
        return self.compared - len(self.differences)

    @cached_property
    def differences(self) -> list[Difference]:
        """Those of them whose output is another one."""
        return differences(self.rows, self.runs.references)

    @property
    def identical(self) -> str:
        """Whether the outputs are those of the reference, and whether they have to be."""
        if not self.differences:
            return "yes" if self.compared else "not compared"
        return "NO, " * any(found.is_error for found in self.differences) + f"{self.same} of {self.compared}"

    def _over(self, base: str | None) -> Ratio | None:
        """Times as fast per token as another method, run against run of a prompt and pass; medians of its passes."""
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
    """The runs of each model and task, in the order of the rows."""
    return {key: RunSet(group) for key, group in grouped(rows, lambda row: (row["model"], row["task"])).items()}


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by something, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _engine_settings(row: Row) -> tuple[Any, ...]:
    """What a configuration says of the engine alone; transformers' is the engine as it is."""
    config = row["settings"]["method"].get("lookahead", {})
    return tuple(config.get(name, getattr(LookaheadConfig, name)) for name in ("pack_weights", "engine"))


def _prompt_of(row: Row) -> tuple[str, str, str]:
    return (row["model"], row["task"], row["prompt"])


def run_of(row: Row) -> tuple[Any, ...]:
    """What runs of several methods have in common; the pass is the last of it."""
    return (*_prompt_of(row), row["repeat"])


def _seconds(row: Row | None, clock: str) -> float | None:
    """Seconds per token of a run, if it gave any."""
    return row[f"{clock}_seconds"] / row["tokens"] if row and row["tokens"] else None


def _compression(rows: Sequence[Row], part: str = "") -> float | None:
    steps = _sum(rows, f"steps{part}")
    return _sum(rows, f"tokens{part}") / steps if steps else None


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)
