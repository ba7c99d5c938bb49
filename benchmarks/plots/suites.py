"""Plots of a benchmark, one message each: speed and S of the methods, accepted lengths, the scaling law.

None has more than eight bars or five lines; what they leave out is in the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.bench.rows import Row
from lookahead.bench.scaling_law import PAPER_LAW, Measured, fit, law_points
from lookahead.bench.summary import MethodSummary, RunSet, grouped
from lookahead.errors import InvalidArgumentError
from plots.picture import (
    BACK,
    GRID,
    INK,
    LINES,
    MILD,
    PALE,
    SOFT,
    STACK,
    STRONG,
    head,
    legend,
    new_figure,
    save,
)

MOST_BARS, MOST_LINES = 8, 5

_LENGTHS = (
    (1, 1, "1 token"),
    (2, 2, "2"),
    (3, 3, "3"),
    (4, 4, "4"),
    (5, 6, "5–6"),
    (7, 10, "7–10"),
    (11, None, "11 or more"),
)
"""Classes of accepted lengths: from, to, label."""

_SIZED = re.compile(r"^(.*?), (\d+)(, .*)?$")
"""A method of several sizes: its name, its size, and what else there is to the name."""

_KINDS = {"auto": STRONG, "other methods of this library": MILD, "transformers": PALE}
"""Whose method a bar is, by its colour."""

_BAR, _AROUND = 0.36, 1.35
"""Height of a bar, and of what stands around the bars, in inches."""


def check_plots(folder: Path) -> None:
    """Refuse plots that could not be drawn.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or the folder is a file.
    """
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError(f"plots in {folder} need matplotlib: pip install 'lookahead-decoding[plot]'")
    if folder.exists() and not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is a file; give the name of a folder")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw SVG files for each model into `folder`, which is made if it is not there; returns them.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []

    def keep(name: str, figure: Any) -> None:
        path = folder / (re.sub(r"[^\w.-]+", "-", name) + ".svg")  # a name that every file system takes
        save(figure, path)
        drawn.append(path)

    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        tasks = grouped(_of_one_kind(of_model), lambda row: row["task"])
        runs = RunSet([row for task in tasks.values() for row in task])
        about = f"{model}, {next(iter(tasks)) if len(tasks) == 1 else f'{len(tasks)} kinds of prompts'}"
        keep(f"{model}-S", _sizes(runs, about) if _series(runs) else _compression(runs, about))
        keep(f"{model}-accepted", _accepted(runs, tasks, about))
        if any(method.over_reference for method in runs.methods):
            keep(f"{model}-speed", _speed(runs, about))
        for task, of_task in grouped(of_model, lambda row: row["task"]).items():
            points = law_points(of_task)
            if len({point.window_size for point in points}) > 1:
                keep(f"{model}-{task}-law", _law(points, f"{model}, {task}"))
    return drawn


def _of_one_kind(rows: Sequence[Row]) -> list[Row]:
    """Rows of greedy tasks where there are any, since sampled texts are others; else of all."""
    greedy = [row for row in rows if not row["settings"].get("task", {}).get("sampling")]
    return greedy or list(rows)


def _family(method: MethodSummary) -> str:
    """What methods have in common that differ in sizes and in how they are run."""
    return method.preset or method.method


def _best(runs: RunSet, value: Callable[[MethodSummary], float]) -> list[MethodSummary]:
    """The best of each family but for the reference, the highest first."""
    best: dict[str, MethodSummary] = {}
    for method in sorted(runs.methods, key=value, reverse=True):
        if value(method) and method.method != runs.plain:
            best.setdefault(_family(method), method)
    return list(best.values())[:MOST_BARS]


def _compression(runs: RunSet, about: str) -> Any:
    methods = _best(runs, lambda method: method.step_compression) or list(runs.methods)[:1]
    figure, axes = new_figure(_BAR * len(methods) + _AROUND)
    ends = [method.before_cycles or 0.0 for method in methods]
    _bars(axes, methods, [method.step_compression for method in methods], ends, "{:.2f}")
    for place, method in enumerate(methods):
        if method.before_cycles is not None:
            label = "before a text repeats itself" if place == 0 else None
            axes.plot([method.before_cycles] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=2.5, label=label)
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    _legend(axes, methods)
    head(axes, f"Tokens per step: {about}", "S, tokens per step; plain decoding has 1")
    return figure


def _speed(runs: RunSet, about: str) -> Any:
    def value(method: MethodSummary) -> float:
        return method.over_reference.median if method.over_reference else 0.0

    methods = _best(runs, value) or [method for method in runs.methods if method.over_reference]
    figure, axes = new_figure(_BAR * len(methods) + _AROUND)
    ends = [method.over_reference.upper if method.over_reference else 0.0 for method in methods]
    _bars(axes, methods, [value(method) for method in methods], ends, "{:.2f}x")
    for place, method in enumerate(methods):
        ratio = method.over_reference
        assert ratio is not None
        label = "middle half of the prompts" if place == 0 else None
        axes.plot([ratio.lower, ratio.upper], [place] * 2, color=INK, linewidth=1.5, label=label)
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    _legend(axes, methods)
    clock = "CPU time" if runs.clock == "cpu" else "wall time"
    head(
        axes,
        f"Speed over transformers' plain decoding: {about}",
        f"{clock} per token: how many times as fast, median of the prompts",
    )
    return figure


def _bars(
    axes: Any, methods: Sequence[MethodSummary], values: Sequence[float], ends: Sequence[float], form: str
) -> None:
    """A bar for each method, with its value behind it and behind what else ends at `ends`."""
    axes.barh(range(len(values)), values, height=0.7, color=[_KINDS[_kind(method)] for method in methods])
    _name_rows(axes, [method.method for method in methods])
    axes.set_xlim(0, 1.12 * max([1.0, *values, *ends]))
    for place, (value, end) in enumerate(zip(values, ends, strict=True)):
        _note(axes, max(value, end), place, form.format(value))
    axes.grid(axis="x", color=GRID)


def _note(axes: Any, right: float, place: int, text: str) -> None:
    axes.annotate(text, (right, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=10, color=INK)


def _kind(method: MethodSummary) -> str:
    if method.preset is None:
        return "transformers"
    return "auto" if method.preset == "auto" else "other methods of this library"


def _legend(axes: Any, methods: Sequence[MethodSummary]) -> None:
    """Whose methods the bars are, and what the marks are."""
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    kinds = [kind for kind in _KINDS if kind in {_kind(method) for method in methods}]
    # Beside the lowest bars, where these are short.
    lowest = axes.patches[-len(kinds) - 1 :]
    columns = 1 if max(bar.get_width() for bar in lowest) < 0.5 * axes.get_xlim()[1] else 2
    legend(axes, columns, handles=[*(Patch(color=_KINDS[kind]) for kind in kinds), *handles], labels=[*kinds, *labels])


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.spines["left"].set_visible(False)


def _series(runs: RunSet) -> dict[str, list[MethodSummary]]:
    """Methods that were measured in several sizes, by name; the best lines, if there are two at least."""
    found: dict[str, list[MethodSummary]] = {}
    for method in runs.methods:
        sized = _SIZED.match(method.method)
        if sized:
            found.setdefault(sized[1] + (sized[3] or ""), []).append(method)
    several = {name: group for name, group in found.items() if len(group) > 2}
    best = sorted(several, key=lambda name: -max(method.step_compression for method in several[name]))
    return {name: several[name] for name in best[:MOST_LINES]} if len(best) > 1 else {}


def _sizes(runs: RunSet, about: str) -> Any:
    """S by the nodes of a step, a line for each method."""
    figure, axes = new_figure(4.2)
    series = _series(runs)
    furthest = [max(method.mean_nodes for method in methods) for methods in series.values()]
    for color, (name, methods) in zip(LINES, series.items(), strict=False):
        nodes = [method.mean_nodes for method in methods]
        values = [method.step_compression for method in methods]
        axes.plot(nodes, values, "o-", color=color, linewidth=2.2, markersize=6)
        ends = nodes[-1] > 0.75 * max(furthest)  # no line goes on beside the name
        place = {"xytext": (8, 0), "va": "center"} if ends else {"xytext": (4, -5), "va": "top"}
        axes.annotate(name, (nodes[-1], values[-1]), textcoords="offset points", fontsize=10, color=color, **place)
    axes.margins(x=0.02)
    axes.set_xlim(left=0, right=1.62 * axes.get_xlim()[1])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1] / 1.6])
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", color=GRID)
    axes.set_ylabel("S, tokens per step", fontsize=10, color=SOFT)
    head(axes, f"Tokens per step, by the nodes of a step: {about}", "nodes that a step sends, mean")
    return figure


def _accepted(runs: RunSet, tasks: dict[str, list[Row]], about: str) -> Any:
    """Shares of the steps by the tokens that they add: by method, or where there are several tasks, by task."""
    if len(tasks) > 1:
        best = max(runs.methods, key=lambda method: (method.preset is not None, method.step_compression)).method
        bars = {task: found for task, rows in tasks.items() if (found := RunSet(rows).by_method.get(best))}
        shown = [(task, MethodSummary(rows, runs)) for task, rows in bars.items()]
        about = f"{runs.model}, {best}"
    else:
        methods = _best(runs, lambda method: method.step_compression) or list(runs.methods)[:1]
        shown = [(method.method, method) for method in methods]
    shown.sort(key=lambda each: -each[1].step_compression)
    label = "share of the steps; at the right S, tokens per step"
    if len(shown) > MOST_BARS:
        half = MOST_BARS // 2
        label += f"; {len(shown) - MOST_BARS} in the middle left out"
        shown = [*shown[:half], *shown[-half:]]
    figure, axes = new_figure(_BAR * len(shown) + _AROUND + 0.3)
    left = [0.0] * len(shown)
    for color, (least, most, name) in zip(STACK, _LENGTHS, strict=True):
        shares = [_share(method, least, most) for _, method in shown]
        axes.barh(
            range(len(shares)), shares, left=left, height=0.7, color=color, edgecolor=BACK, linewidth=0.8, label=name
        )
        left = [start + share for start, share in zip(left, shares, strict=True)]
    _name_rows(axes, [name for name, _ in shown])
    for place, (_, method) in enumerate(shown):
        _note(axes, 1, place, f"{method.step_compression:.2f}")
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.spines["bottom"].set_visible(False)
    legend(axes, len(_LENGTHS))
    head(axes, f"Tokens that a step adds: {about}", label)
    return figure


def _share(method: MethodSummary, least: int, most: int | None) -> float:
    steps = sum(method.accepted.values())
    within = sum(
        count for length, count in method.accepted.items() if length >= least and (most is None or length <= most)
    )
    return within / steps if steps else 0.0


def _law(points: Sequence[Measured], about: str) -> Any:
    """Measured S by W = G and N, and Eq. 7 with the alpha and f that fit; for N=5 also with those of the paper."""
    figure, axes = new_figure(4.6)
    found = fit(points)
    sizes = range(1, max(point.window_size for point in points) + 1)
    lengths = sorted({point.ngram_size for point in points})[: MOST_LINES - 1]
    for color, length in zip(LINES, lengths, strict=False):
        of_length = [point for point in points if point.ngram_size == length]
        law = [found.law.step_compression(size, length) for size in sizes]
        axes.plot(sizes, law, color=color, linewidth=2, label=f"N={length}")
        measured = [point.step_compression for point in of_length]
        axes.plot([point.window_size for point in of_length], measured, "o", color=color)
    theirs = [PAPER_LAW.step_compression(size, 5) for size in sizes]
    name = f"N=5, the paper's α={PAPER_LAW.alpha}, f={PAPER_LAW.f}"
    axes.plot(sizes, theirs, "--", color=LINES[-1], linewidth=2, label=name)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("S, tokens per step", fontsize=10, color=SOFT)
    axes.set_ylim(bottom=1)
    axes.grid(color=GRID)
    legend(axes, MOST_LINES)
    head(
        axes,
        f"Measured S, and the law that fits: {about}",
        f"W = G; dots: measured, lines: α={found.law.alpha:.3f}, f={found.law.f:.3f}",
    )
    return figure
