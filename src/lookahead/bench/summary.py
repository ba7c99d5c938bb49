"""What many runs come to: whether outputs are those of `model.generate`, and figures of one method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from lookahead.bench.repetition import final_cycle_share, tokens_before_cycles
from lookahead.bench.rows import Row
from lookahead.config import LookaheadConfig

MOST_SHOWN = 10
"""Differences that a command lists one by one."""


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


class Reference:
    """The outputs of the reference method, by prompt."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._outputs: dict[tuple[str, str, str], list[int]] = {}
        for row in rows:
            if row["reference"]:
                self._outputs.setdefault(_prompt_of(row), row["output"])

    def has(self, row: Row) -> bool:
        """Whether there is something to compare the row with."""
        return _prompt_of(row) in self._outputs

    def difference(self, row: Row) -> Difference | None:
        """How the row differs; `None` if it does not, or if the reference has not run."""
        expected = self._outputs.get(_prompt_of(row))
        if expected is None:
            return None
        position = first_difference(row["output"], expected)
        return None if position is None else Difference(row, position, bool(row["exact"]))


def differences(rows: Sequence[Row]) -> list[Difference]:
    """All outputs that are not the reference's."""
    reference = Reference(rows)
    found = (reference.difference(row) for row in rows)
    return [difference for difference in found if difference is not None]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs; `None` for identical texts."""
    if list(output) == list(expected):
        return None
    pairs = zip(output, expected, strict=False)  # one may be the beginning of the other
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(expected)))


def _prompt_of(row: Row) -> tuple[str, str, str]:
    return (row["model"], row["task"], row["prompt"])


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another method, over prompts.

    Attributes:
        median: Of the prompts' ratios.
        lower: Their first quartile.
        upper: Their third quartile.
    """

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
        reference: The outputs to compare with.
        clock: Whether speeds are of `"cpu"` or `"wall"` time: CPU time on CPUs, wall time on other devices.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: int(row["order"]))
        self.reference = Reference(rows)
        self.by_method = grouped(self.rows, lambda row: row["method"])
        self.clock = "cpu" if self.rows[0]["machine"]["type"] == "cpu" else "wall"

    @cached_property
    def methods(self) -> tuple[MethodSummary, ...]:
        """The methods, in the order of the suite."""
        return tuple(MethodSummary(group, self) for group in self.by_method.values())

    @property
    def plain(self) -> str | None:
        """Name of the reference method, if it has run."""
        names: list[str] = [name for name, group in self.by_method.items() if group[0]["reference"]]
        return names[0] if names else None

    @property
    def model(self) -> str:
        """Name of the model, if it is one."""
        return str(self.rows[0]["model"])

    @property
    def task(self) -> str:
        """Name of the task, if it is one."""
        return str(self.rows[0]["task"])

    def engine_base(self, row: Row) -> str | None:
        """The method that decodes plainly through the engine set as for this row; transformers has it as it is."""
        wanted = _engine_settings(row) or (LookaheadConfig.pack_weights, LookaheadConfig.engine)
        for method in self.methods:
            if method.preset == "autoregressive" and _engine_settings(method.rows[0]) == wanted:
                return method.method
        return None


class MethodSummary:
    """One method, on the runs in `rows`.

    A figure is `None` where nothing was measured that it could come from.
    """

    def __init__(self, rows: Sequence[Row], runs: RunSet) -> None:
        """Nothing is computed yet.

        Args:
            rows: Its runs, one at least.
            runs: All runs, to compare with.
        """
        self.rows = rows
        self._all = runs

    @property
    def method(self) -> str:
        """Its name."""
        return str(self.rows[0]["method"])

    @property
    def method_settings(self) -> Mapping[str, Any]:
        """Its settings."""
        settings: Mapping[str, Any] = self.rows[0]["settings"]["method"]
        return settings

    @property
    def preset(self) -> str | None:
        """The preset of this library, `None` for transformers."""
        preset: str | None = self.method_settings.get("lookahead", {}).get("preset")
        return preset

    @property
    def prompts(self) -> frozenset[str]:
        """The prompts."""
        return frozenset(row["prompt"] for row in self.rows)

    @property
    def size(self) -> int:
        """How many runs they are."""
        return len(self.rows)

    @property
    def step_compression(self) -> float:
        """S, tokens per step over all runs."""
        return _compression(self.rows)

    @property
    def lowest(self) -> float:
        """S of the prompt with the lowest."""
        return min(_compression([row]) for row in self.rows)

    @property
    def highest(self) -> float:
        """S of the prompt with the highest."""
        return max(_compression([row]) for row in self.rows)

    @property
    def before_cycles(self) -> float | None:
        """S up to the first repeated cycle of each output."""
        steps = _sum(self.rows, "steps_before_cycles")
        return _sum(self.rows, "tokens_before_cycles") / steps if steps else None

    @property
    def free_tokens(self) -> int:
        """Tokens before the first repeated cycle."""
        return sum(tokens_before_cycles(row["output"]) for row in self.rows)

    @property
    def cycle_share(self) -> float:
        """Share of all tokens that lie in a repeated cycle."""
        return self._share_of_tokens(row["cycle_share"] for row in self.rows)

    @property
    def final_cycle_share(self) -> float:
        """Share of all tokens that lie in a repeated cycle which lasts to the end of the text."""
        return self._share_of_tokens(final_cycle_share(row["output"]) for row in self.rows)

    @property
    def mean_nodes(self) -> float:
        """Nodes per step."""
        steps = _sum(self.rows, "steps")
        return sum(_nodes(row) for row in self.rows) / steps if steps else 0.0

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest step."""
        return max((max(row["nodes_per_step"], default=0) for row in self.rows), default=0)

    @property
    def cpu_per_token(self) -> float | None:
        """CPU milliseconds per token, median of the runs."""
        return _per_token(self.rows, "cpu")

    @property
    def wall_per_token(self) -> float | None:
        """Wall milliseconds per token, likewise."""
        return _per_token(self.rows, "wall")

    @property
    def time_per_token(self) -> float | None:
        """Milliseconds per token by the clock that counts."""
        return _per_token(self.rows, self._all.clock)

    @property
    def over_reference(self) -> Ratio | None:
        """Speed over plain `model.generate`."""
        return self._over(self._all.plain)

    @property
    def over_plain(self) -> Ratio | None:
        """Speed over plain decoding through the same engine."""
        return self._over(self._all.engine_base(self.rows[0]))

    @property
    def time_over_reference(self) -> float | None:
        """CPU time of all runs over that of plain `model.generate` on the same prompts."""
        plain = {_run_of(row): row["cpu_seconds"] for row in self._all.by_method.get(self._all.plain or "", [])}
        if any(row["cpu_seconds"] is None or plain.get(_run_of(row)) is None for row in self.rows):
            return None
        return float(sum(row["cpu_seconds"] for row in self.rows) / sum(plain[_run_of(row)] for row in self.rows))

    @property
    def compared(self) -> int:
        """Runs whose output was compared with the reference's."""
        return sum(self._all.reference.has(row) for row in self.rows)

    @property
    def different(self) -> int:
        """Those whose output differs."""
        return len(self._differences)

    @property
    def same(self) -> int:
        """Those whose output does not."""
        return self.compared - self.different

    @property
    def identical(self) -> str:
        """Whether the outputs are those of the reference, and whether they have to be."""
        found = self._differences
        if not self.compared or not found:
            return "yes" if self.compared else "not compared"
        return "NO, " * any(one.is_error for one in found) + f"{self.same} of {self.compared}"

    def _share_of_tokens(self, shares: Iterable[float]) -> float:
        tokens = _sum(self.rows, "tokens")
        weighted = (share * row["tokens"] for share, row in zip(shares, self.rows, strict=True))
        return sum(weighted) / tokens if tokens else 0.0

    @property
    def _differences(self) -> list[Difference]:
        return [found for row in self.rows if (found := self._all.reference.difference(row)) is not None]

    def _over(self, base: str | None) -> Ratio | None:
        return None if base is None else speed_over(self.rows, self._all.by_method[base], self._all.clock)


def summarise(rows: Sequence[Row]) -> list[RunSet]:
    """The runs of each task on each model, in the order of the rows."""
    return [RunSet(of_task) for of_task in grouped(rows, lambda row: (row["model"], row["task"])).values()]


def speed_over(rows: Sequence[Row], base: Sequence[Row], clock: str) -> Ratio | None:
    """How many times as fast per token, run against run of the same prompt and pass; medians of a prompt's passes.

    Args:
        rows: Runs of a method.
        base: Runs of the method to compare with.
        clock: `"cpu"` or `"wall"`.
    """
    at = {_run_of(row): row for row in base}
    ratios: dict[Any, list[float]] = {}
    for row in rows:
        seconds, base_seconds = _seconds(row, clock), _seconds(at.get(_run_of(row)), clock)
        if seconds is not None and base_seconds is not None:
            ratios.setdefault(_run_of(row)[:-1], []).append(base_seconds / seconds)
    if not ratios:
        return None
    lower, middle, upper = np.percentile([median(values) for values in ratios.values()], [25, 50, 75]).tolist()
    return Ratio(middle, lower, upper)


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by something, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _engine_settings(row: Row) -> tuple[Any, ...] | None:
    """What a configuration says of the engine alone; `None` for transformers."""
    config = row["settings"]["method"].get("lookahead")
    if config is None:
        return None
    return (config.get("pack_weights", LookaheadConfig.pack_weights), config.get("engine", LookaheadConfig.engine))


def _nodes(row: Row) -> int:
    """Nodes of all steps of a run; rows of old runs know no more than that."""
    return int(row["nodes"]) if "nodes" in row else sum(row["nodes_per_step"])


def _run_of(row: Row) -> tuple[Any, ...]:
    """What runs of several methods have in common; the pass is the last of it."""
    return (row["model"], row["task"], row["prompt"], row["repeat"])


def _seconds(row: Row | None, clock: str) -> float | None:
    """Seconds per token of a run, if it was timed and gave any."""
    seconds = None if row is None else row[f"{clock}_seconds"]
    return None if row is None or seconds is None or not row["tokens"] else seconds / row["tokens"]


def _per_token(rows: Sequence[Row], clock: str) -> float | None:
    times = [seconds for row in rows if (seconds := _seconds(row, clock)) is not None]
    return 1000 * median(times) if times else None


def _compression(rows: Sequence[Row]) -> float:
    steps = _sum(rows, "steps")
    return _sum(rows, "tokens") / steps if steps else 0.0


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)
