"""The report of a benchmark: all of its tables, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from derived_tables import best_published
from lookahead.bench.comparison import Difference, differences
from lookahead.bench.rows import Row
from lookahead.bench.summary import grouped
from tables import build, markdown

MOST_DIFFERENCES = 20
"""Differences that are listed one by one for a model."""

_MODEL = ("architecture", "parameters", "weights", "type", "device", "threads", "versions")
_TASKS = ("data", "prompts", "passes", "new tokens", "temperature", "top-k", "top-p")
_METHODS = ("nodes", "S", "before", "cpu", "wall", "speed", "engine speed", "cycles", "identical")


def report(rows: Sequence[Row]) -> str:
    """All tables, and the outputs that differ although they must not."""
    lines = []
    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        tables = {
            f"## {model}": build({"by": ["model"], "columns": _MODEL}, of_model),
            "### Tasks": build({"by": ["task"], "columns": _TASKS}, of_model),
        }
        for task, of_task in grouped(of_model, lambda row: row["task"]).items():
            tables[f"### {task}"] = build({"by": ["method"], "columns": _METHODS}, of_task)
        tables["### S at equal numbers of nodes"] = best_published(of_model)
        for title, table in tables.items():
            lines += [title, "", *markdown(*table), ""] if table[1] else []
        lines += _differing([found for found in differences(rows) if found.row["model"] == model])
    return "\n".join(lines)


def _differing(found: Sequence[Difference]) -> list[str]:
    """A list of the outputs that are not the reference's but had to be."""
    errors = [difference for difference in found if difference.is_error]
    if not errors:
        return []
    lines = [f"**Outputs that differ although they must not: {len(errors)}.**", ""]
    lines += [f"- {difference}" for difference in errors[:MOST_DIFFERENCES]]
    return [*lines, *([f"- and {len(errors) - MOST_DIFFERENCES} more"] * (len(errors) > MOST_DIFFERENCES)), ""]
