"""What many runs come to: one line for each method on a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from lookahead.bench.comparison import Reference
from lookahead.bench.rows import Row
from lookahead.config import LookaheadConfig


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


@dataclass(frozen=True)
class MethodSummary:
    """One method on one task.

    Attributes:
        method: Its name.
        settings: Its settings.
        runs: Runs measured.
        prompts: The prompts of these.
        step_compression: S, tokens per step over all runs.
        before_cycles: S up to the first repeated cycle of each output; `None` if there is nothing before.
        mean_nodes: Nodes per step.
        most_nodes: Nodes of the largest step.
        cpu_per_token: CPU seconds per token, median of the runs; `None` without any token.
        wall_per_token: Wall seconds per token, likewise.
        over_reference: Speed over plain `model.generate`; `None` if that did not run.
        over_plain: Speed over plain decoding through the same engine, likewise.
        cycle_share: Share of all tokens that lie in a repeated cycle.
        compared: Runs whose output was compared with the reference's.
        different: Those whose output differs.
        must_match: Whether a difference is an error.
        resident_bytes: Most resident memory after a run, of the whole process; `None` if unknown.
        accepted: How many steps added how many tokens.
    """

    method: str
    settings: Mapping[str, Any]
    runs: int
    prompts: frozenset[str]
    step_compression: float
    before_cycles: float | None
    mean_nodes: float
    most_nodes: int
    cpu_per_token: float | None
    wall_per_token: float | None
    over_reference: Ratio | None
    over_plain: Ratio | None
    cycle_share: float
    compared: int
    different: int
    must_match: bool
    resident_bytes: int | None
    accepted: Counter[int]

    @property
    def preset(self) -> str | None:
        """The preset of this library, `None` for transformers."""
        preset: str | None = self.settings.get("lookahead", {}).get("preset")
        return preset


@dataclass(frozen=True)
class TaskSummary:
    """All methods on one task and one model.

    Attributes:
        model: The model's name.
        task: The task's name.
        settings: Settings of model and task, and machine and versions.
        prompts: Prompts measured.
        repeats: Passes over them.
        clock: Whether speeds are of `"cpu"` or `"wall"` time: CPU time on CPUs, wall time on other devices.
        methods: The methods, in the order of the suite.
    """

    model: str
    task: str
    settings: Mapping[str, Any]
    prompts: int
    repeats: int
    clock: str
    methods: tuple[MethodSummary, ...]


def summarise(rows: Sequence[Row]) -> list[TaskSummary]:
    """One summary for each task on each model, in the order of the rows."""
    reference = Reference(rows)
    groups = _grouped(rows, lambda row: (row["model"], row["task"]))
    return [_task_summary(model, task, of_task, reference) for (model, task), of_task in groups.items()]


def _task_summary(model: str, task: str, rows: Sequence[Row], reference: Reference) -> TaskSummary:
    by_method = _grouped(sorted(rows, key=lambda row: row["order"]), lambda row: row["method"])
    clock = "cpu" if rows[0]["machine"]["type"] == "cpu" else "wall"
    plain = next((name for name, group in by_method.items() if group[0]["reference"]), None)

    def over(own: Sequence[Row], base: str | None) -> Ratio | None:
        return None if base is None else speed_over(own, by_method[base], clock)

    methods = tuple(
        _method_summary(name, group, reference, over(group, plain), over(group, _engine_base(group[0], by_method)))
        for name, group in by_method.items()
    )
    return TaskSummary(
        model,
        task,
        {**rows[0]["settings"], "machine": rows[0]["machine"], "versions": rows[0]["versions"]},
        len({row["prompt"] for row in rows}),
        len({row["repeat"] for row in rows}),
        clock,
        methods,
    )


def _method_summary(
    name: str, rows: Sequence[Row], reference: Reference, over_reference: Ratio | None, over_plain: Ratio | None
) -> MethodSummary:
    tokens, steps = _sum(rows, "tokens"), _sum(rows, "steps")
    early_tokens, early_steps = _sum(rows, "tokens_before_cycles"), _sum(rows, "steps_before_cycles")
    nodes = [number for row in rows for number in row["nodes_per_step"]]
    compared = [row for row in rows if reference.has(row)]
    memory = [row["resident_bytes"] for row in rows if row["resident_bytes"] is not None]
    return MethodSummary(
        method=name,
        settings=rows[0]["settings"]["method"],
        runs=len(rows),
        prompts=frozenset(row["prompt"] for row in rows),
        step_compression=tokens / steps if steps else 0.0,
        before_cycles=early_tokens / early_steps if early_steps else None,
        mean_nodes=sum(nodes) / len(nodes) if nodes else 0.0,
        most_nodes=max(nodes, default=0),
        cpu_per_token=_per_token(rows, "cpu"),
        wall_per_token=_per_token(rows, "wall"),
        over_reference=over_reference,
        over_plain=over_plain,
        cycle_share=sum(row["cycle_share"] * row["tokens"] for row in rows) / tokens if tokens else 0.0,
        compared=len(compared),
        different=sum(reference.difference(row) is not None for row in compared),
        must_match=any(row["exact"] for row in rows),
        resident_bytes=max(memory, default=None),
        accepted=Counter(length for row in rows for length in row["accepted_lengths"]),
    )


def _engine_base(row: Row, by_method: Mapping[str, Sequence[Row]]) -> str | None:
    """The method that decodes plainly through the engine set as for this row; transformers has the engine as it is."""
    wanted = _engine_settings(row) or (LookaheadConfig.pack_weights, LookaheadConfig.engine)
    for name, group in by_method.items():
        config = group[0]["settings"]["method"].get("lookahead", {})
        if config.get("preset") == "autoregressive" and _engine_settings(group[0]) == wanted:
            return name
    return None


def _engine_settings(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a configuration says of the engine alone; `None` for transformers."""
    config = row["settings"]["method"].get("lookahead")
    if config is None:
        return None
    return (config.get("pack_weights", LookaheadConfig.pack_weights), config.get("engine", LookaheadConfig.engine))


def speed_over(rows: Sequence[Row], base: Sequence[Row], clock: str) -> Ratio | None:
    """How many times as fast per token, run against run of the same prompt and pass; medians of a prompt's passes.

    Args:
        rows: Runs of a method.
        base: Runs of the method to compare with.
        clock: `"cpu"` or `"wall"`.
    """
    at = {(row["prompt"], row["repeat"]): row for row in base if row["tokens"]}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        other = at.get((row["prompt"], row["repeat"]))
        if other is not None and row["tokens"]:
            own = row[f"{clock}_seconds"] / row["tokens"]
            ratios.setdefault(row["prompt"], []).append(other[f"{clock}_seconds"] / other["tokens"] / own)
    if not ratios:
        return None
    lower, middle, upper = np.percentile([median(values) for values in ratios.values()], [25, 50, 75]).tolist()
    return Ratio(middle, lower, upper)


def _per_token(rows: Sequence[Row], clock: str) -> float | None:
    times = [row[f"{clock}_seconds"] / row["tokens"] for row in rows if row["tokens"]]
    return median(times) if times else None


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
