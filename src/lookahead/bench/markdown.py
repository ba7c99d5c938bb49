"""Tables of a benchmark in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lookahead.bench.comparison import Difference, differences
from lookahead.bench.rows import Row
from lookahead.bench.summary import MethodSummary, Ratio, TaskSummary, summarise

MOST_DIFFERENCES = 20
"""Differences that are listed one by one for a model."""

NOTHING = "–"

_LEGEND = """\
S is tokens per step, over all prompts together; "before cycles" counts each output only up to its first repeated
cycle, inside of which every method that drafts from n-grams looks excellent. Times are medians over runs. Speed is that
of the same prompt in the same pass, plain decoding being 1.00: the median over prompts, and the quartiles in brackets;
"over transformers" is over its own plain `generate`, "over plain engine" over one token a step through the engine of
this library. "Identical" compares every output with that of plain `generate`, token for token. A bare count means that
a difference is no error there: in short number types rounding decides between tokens that are nearly equally likely,
and transformers' own drafting methods draw other tokens under the same seed, from the same distribution."""


def report(rows: Sequence[Row]) -> str:
    """All tables, with what one needs to know to read them."""
    summaries = summarise(rows)
    lines = [_LEGEND]
    for model in dict.fromkeys(summary.model for summary in summaries):
        of_model = [summary for summary in summaries if summary.model == model]
        lines += ["", f"## {model}", "", _circumstances(of_model[0])]
        for summary in of_model:
            lines += ["", f"### {summary.task}", "", _asked(summary), "", *_table(summary)]
        budgets = list(_budget_rows(of_model))
        if budgets:
            lines += [
                "",
                "### S at equal numbers of nodes",
                "",
                _BUDGETS,
                "",
                *_markdown_table(_BUDGET_TITLES, budgets),
            ]
        lines += _differing([found for found in differences(rows) if found.row["model"] == model])
    return "\n".join(lines) + "\n"


def into_page(page: str, tables: str, section: str = "results") -> str:
    """The page with one of its generated sections replaced; a page without such a section becomes the tables alone.

    Args:
        page: The page, empty for a new one.
        tables: What to put there.
        section: Name of the section, which lies between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
    """
    # Lines of their own: a page may also speak of its marks.
    marks = rf"(?ms)^(<!-- {section}: begin -->)$.*?^(<!-- {section}: end -->)$"
    found = re.search(marks, page)
    if found is None:
        return tables
    return f"{page[: found.end(1)]}\n\n{tables}\n{page[found.start(2) :]}"


def _circumstances(summary: TaskSummary) -> str:
    model, machine, versions = (summary.settings[name] for name in ("model", "machine", "versions"))
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}" if machine["type"] == "cpu" else ""
    weights = "random weights" if "random" in model else "trained weights"
    return (
        f"{model['architecture']} of {model['parameters'] / 1e6:,.1f} million parameters, {weights} "
        f"(`{model['identity']}`), in {model['dtype']}, on {machine['device']}{threads}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}."
    )


def _asked(summary: TaskSummary) -> str:
    task = summary.settings["task"]
    drawing = task["sampling"]
    how = "greedy" if drawing is None else f"sampled at temperature {drawing['temperature']:g}"
    if drawing is not None:
        how += f", top-k {drawing['top_k']}" if drawing["top_k"] else ""
        how += f", top-p {drawing['top_p']:g}" if drawing["top_p"] < 1 else ""
    passes = f", {summary.repeats} passes" if summary.repeats > 1 else ""
    return f"{summary.prompts} prompts of {task['data']}, up to {task['max_new_tokens']} tokens each, {how}{passes}."


def _table(summary: TaskSummary) -> list[str]:
    clock = "CPU" if summary.clock == "cpu" else "wall"
    titles = (
        *("method", "nodes per step", "S", "before cycles", "CPU ms per token", "wall ms per token"),
        *(f"{clock} speed over transformers", "over plain engine", "in cycles", "identical"),
    )
    return _markdown_table(titles, [_cells(method) for method in summary.methods])


def _cells(method: MethodSummary) -> list[str]:
    """The figures of a method, as they stand in its line of the table."""
    return [
        method.method,
        f"{method.mean_nodes:.1f}",
        f"{method.step_compression:.2f}",
        NOTHING if method.before_cycles is None else f"{method.before_cycles:.2f}",
        _milliseconds(method.cpu_per_token),
        _milliseconds(method.wall_per_token),
        _ratio(method.over_reference),
        _ratio(method.over_plain),
        f"{method.cycle_share:.0%}",
        identical(method),
    ]


def identical(method: MethodSummary) -> str:
    """Whether the outputs are those of the reference, and whether they have to be."""
    if not method.compared:
        return "not compared"
    if not method.different:
        return "yes"
    same = f"{method.compared - method.different} of {method.compared}"
    return f"NO, {same}" if method.must_match else same


def _ratio(ratio: Ratio | None) -> str:
    return NOTHING if ratio is None else f"{ratio.median:.2f}x [{ratio.lower:.2f}, {ratio.upper:.2f}]"


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1000 * seconds:.2f}"


_BUDGETS = """\
The best published method is the one with the highest S among those that ran on the same prompts, never send more nodes
in a step, draft without a second model and keep nothing from prompt to prompt."""

_BUDGET_TITLES = ("task", "method", "nodes at most", "memory", "S", "best published method", "its S", "ratio")


def _budget_rows(summaries: Iterable[TaskSummary]) -> Iterator[list[str]]:
    """A line for each `"auto"` with a fixed number of nodes, beside the best of the methods that it is made of."""
    for summary in summaries:
        for method in summary.methods:
            config: Mapping[str, Any] = method.settings.get("lookahead", {})
            budget = config.get("step_budget")
            if method.preset != "auto" or budget is None:
                continue
            rivals = [
                other
                for other in summary.methods
                if _is_published(other) and other.most_nodes <= budget and other.prompts == method.prompts
            ]
            best = max(rivals, key=lambda rival: rival.step_compression, default=None)
            yield [
                summary.task,
                method.method,
                str(budget),
                str(config["memory"]),
                f"{method.step_compression:.2f}",
                *(
                    (NOTHING, NOTHING, NOTHING)
                    if best is None
                    else (
                        best.method,
                        f"{best.step_compression:.2f}",
                        f"{method.step_compression / best.step_compression:.2f}x" if best.step_compression else NOTHING,
                    )
                ),
            ]


def _is_published(method: MethodSummary) -> bool:
    config = method.settings.get("lookahead")
    if config is None:
        return bool(method.settings["transformers"]) and method.settings["assistant"] is None
    return config["preset"] not in ("auto", "autoregressive") and config["memory"] == "request"


def _differing(found: Sequence[Difference]) -> list[str]:
    """A list of the outputs that are not the reference's but had to be."""
    errors = [difference for difference in found if difference.is_error]
    if not errors:
        return []
    lines = ["", f"**Outputs that differ although they must not: {len(errors)}.**", ""]
    lines += [f"- {difference}" for difference in errors[:MOST_DIFFERENCES]]
    return lines + [f"- and {len(errors) - MOST_DIFFERENCES} more"] * (len(errors) > MOST_DIFFERENCES)


def _markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is of text, the others of figures."""
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
