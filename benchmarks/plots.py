"""Plots of the pages, one message each, readable on light and on dark pages.

Of a suite: speed and S of the methods, S by the nodes of a step, the scaling law. Of probes: the kinds of work that
were replayed, and what a load generator saw. None has more than eight bars or five lines; what they leave out is in
the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from lookahead.bench.rows import Row, named, read_lines
from lookahead.bench.scaling_law import PAPER_LAW, Measured, fit, law_points
from lookahead.bench.summary import MethodSummary, RunSet, grouped
from lookahead.errors import InvalidArgumentError

MOST_BARS, MOST_LINES = 8, 5

BACK, INK, SOFT, GRID = "#ffffff", "#1b1f24", "#59636e", "#d1d9e0"
STRONG, MILD, PALE = "#0a5fb4", "#86b6e4", "#b4bcc6"
LINES = ("#0a5fb4", "#b35c00", "#1a7f37", "#8250df", "#5f6b77")

_DARK = {
    BACK: "#14181d",
    INK: "#e8edf2",
    SOFT: "#9da7b3",
    GRID: "#3a434d",
    STRONG: "#58a6ff",
    MILD: "#2f6096",
    PALE: "#56616e",
    **dict(zip(LINES[1:], ("#ffa657", "#6bc46d", "#c297ff", "#aab4c0"), strict=True)),
}
"""What each colour is on a dark page."""

_WIDTH = 7.6
"""Inches: at the width of a page letters are as large as those of the text."""

_BAR, _AROUND = 0.36, 1.35
"""Height of a bar, and of what stands around the bars, in inches."""

_SIZED = re.compile(r"^(.*?), (\d+)(, .*)?$")
"""A method of several sizes: its name, its size, and what else there is to the name."""

_KINDS = {"auto": STRONG, "other methods of this library": MILD, "transformers": PALE}
"""Whose method a bar is, by its colour."""

SERVERS = {"lookahead serve": STRONG, "lookahead serve, no drafts": MILD, "transformers serve": PALE}
WORK = {"answers": "answers in a chat", "code_edits": "edits of code", "agent_traces": "steps of agents"}
MEMORIES = {True: "drafts from earlier requests as well", False: "drafts from its own prompt and text"}
REPLAYED = {"kind": "replay", "method": "auto, text only", "size": "tree of 32"}


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
    drawn = []
    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        for name, figure in _of_model(model, of_model):
            drawn.append(folder / (re.sub(r"[^\w.-]+", "-", name) + ".svg"))  # a name that every file system takes
            _save(figure, drawn[-1])
    return drawn


def draw_kinds_of_work(results: Path, path: Path) -> None:
    """S on recorded answers, by the kind of work: a pair of bars each, with a memory for all requests and without."""
    rows = [row for row in read_lines(results) if REPLAYED.items() <= row.items()]
    figure, axes = _new_figure(2.9)
    for offset, (across, label) in zip((0.5, -0.5), MEMORIES.items(), strict=True):
        found = [[row for row in rows if (row["task"], row["across"]) == (task, across)] for task in WORK]
        values = [sum(row["tokens"] for row in own) / sum(row["steps"] for row in own) for own in found]
        places = [place + _BAR * offset for place in range(len(WORK))]
        axes.barh(places, values, height=_BAR, color=STRONG if across else MILD, label=label)
        for place, value in zip(places, values, strict=True):
            _note(axes, value, place, f"{value:.1f}")
    axes.set_yticks(range(len(WORK)), list(WORK.values()))
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    axes.grid(axis="x", color=GRID)
    _legend(axes, 2)
    _head(axes, "Tokens per step on real answers, by the kind of work", "S, tokens per step; plain decoding has 1")
    _save(figure, path)


def draw_load(results: Path, path: Path) -> None:
    """Tokens per second that users of servers get: medians of the repeats, and lines from least to most."""
    rows = [row for row in read_lines(results) if row["kind"] == "run"]
    users = sorted({row["users"] for row in rows})
    figure, axes = _new_figure(3.6)
    for offset, (server, color) in zip((-0.26, 0, 0.26), SERVERS.items(), strict=True):
        for place, count in enumerate(users):
            found = [row["tokens_per_second"] for row in rows if (row["server"], row["users"]) == (server, count)]
            label = server if place == 0 else None
            axes.barh(place + offset, median(found), 0.23, color=color, label=label)
            axes.plot([min(found), max(found)], [place + offset] * 2, color=INK, linewidth=1)
            _note(axes, max(found), place + offset, f"{median(found):.0f}")
    axes.set_yticks(range(len(users)), [f"{count} users" if count > 1 else "1 user" for count in users])
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.06)
    _head(axes, "Tokens per second that users of a server get", "tokens per second, all users together")
    _legend(axes, 3)
    _save(figure, path)


def best_of_families(runs: RunSet, value: Callable[[MethodSummary], float]) -> list[MethodSummary]:
    """The best method of each preset, or of transformers' by name, but for the reference; the highest first."""
    best: dict[str, MethodSummary] = {}
    for method in sorted(runs.methods, key=value, reverse=True):
        if value(method) and method.method != runs.plain:
            best.setdefault(method.preset or method.method, method)
    return list(best.values())[:MOST_BARS]


def _of_model(model: str, rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Names and figures; of greedy tasks where there are any, since sampled texts are others."""
    greedy = [row for row in rows if not row["settings"].get("task", {}).get("sampling")] or list(rows)
    tasks = grouped(greedy, lambda row: row["task"])
    runs = RunSet(greedy)
    about = f"{model}, {next(iter(tasks)) if len(tasks) == 1 else f'{len(tasks)} kinds of prompts'}"
    series = _series(runs)
    yield f"{model}-S", _sizes(series, about) if series else _compression(runs, about)
    if any(method.over_reference for method in runs.methods):
        yield f"{model}-speed", _speed(runs, about)
    for task, of_task in grouped(rows, lambda row: row["task"]).items():
        points = law_points(of_task)
        if len({point.window_size for point in points}) > 1:
            yield f"{model}-{task}-law", _law(points, f"{model}, {task}")


def _compression(runs: RunSet, about: str) -> Any:
    methods = best_of_families(runs, lambda method: method.step_compression) or list(runs.methods)[:1]
    bars = [(method, method.step_compression, method.before_cycles or 0.0) for method in methods]
    figure, axes = _bars(bars, "{:.2f}")
    marked = [(place, end) for place, (_, _, end) in enumerate(bars) if end]
    for number, (place, end) in enumerate(marked):
        label = None if number else "before a text repeats itself"
        axes.plot([end] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=2.5, label=label)
    _legend(axes, 2)
    _head(axes, f"Tokens per step: {about}", "S, tokens per step; plain decoding has 1")
    return figure


def _speed(runs: RunSet, about: str) -> Any:
    def value(method: MethodSummary) -> float:
        return method.over_reference.median if method.over_reference else 0.0

    methods = best_of_families(runs, value) or [method for method in runs.methods if method.over_reference]
    ratios = [ratio for method in methods if (ratio := method.over_reference) is not None]
    bars = [(method, ratio.median, ratio.upper) for method, ratio in zip(methods, ratios, strict=True)]
    figure, axes = _bars(bars, "{:.2f}x")
    for place, ratio in enumerate(ratios):
        label = None if place else "middle half of the prompts"
        axes.plot([ratio.lower, ratio.upper], [place] * 2, color=INK, linewidth=1.5, label=label)
    _legend(axes, 2)
    clock = "CPU time" if runs.clock == "cpu" else "wall time"
    label = f"{clock} per token: how many times as fast, median of the prompts"
    _head(axes, f"Speed over transformers' plain decoding: {about}", label)
    return figure


def _bars(bars: Sequence[tuple[MethodSummary, float, float]], form: str) -> tuple[Any, Any]:
    """A bar for each method, with its value behind it and behind what else ends there."""
    figure, axes = _new_figure(_BAR * len(bars) + _AROUND)
    for kind, color in _KINDS.items():
        of_kind = [(place, value) for place, (method, value, _) in enumerate(bars) if _kind(method) == kind]
        if of_kind:
            axes.barh(*zip(*of_kind, strict=True), height=0.7, color=color, label=kind)
    for place, (_, value, end) in enumerate(bars):
        _note(axes, max(value, end), place, form.format(value))
    axes.set_yticks(range(len(bars)), [method.method for method, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.set_xlim(0, 1.12 * max(1.0, *(max(value, end) for _, value, end in bars)))
    axes.spines["left"].set_visible(False)
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    axes.grid(axis="x", color=GRID)
    return figure, axes


def _kind(method: MethodSummary) -> str:
    if method.preset is None:
        return "transformers"
    return "auto" if method.preset == "auto" else "other methods of this library"


def _series(runs: RunSet) -> Mapping[str, list[MethodSummary]]:
    """Methods that were measured in several sizes, by name; the best lines, if there are two at least."""
    found: dict[str, list[MethodSummary]] = {}
    for method in runs.methods:
        sized = _SIZED.match(method.method)
        if sized:
            found.setdefault(sized[1] + (sized[3] or ""), []).append(method)
    several = {name: group for name, group in found.items() if len(group) > 2}
    best = sorted(several, key=lambda name: -max(method.step_compression for method in several[name]))
    return {name: several[name] for name in best[:MOST_LINES]} if len(best) > 1 else {}


def _sizes(series: Mapping[str, list[MethodSummary]], about: str) -> Any:
    """S by the nodes of a step, a line for each method."""
    figure, axes = _new_figure(4.2)
    furthest = max(method.mean_nodes for methods in series.values() for method in methods)
    for color, (name, methods) in zip(LINES, series.items(), strict=False):
        nodes = [method.mean_nodes for method in methods]
        values = [method.step_compression for method in methods]
        axes.plot(nodes, values, "o-", color=color, linewidth=2.2, markersize=6)
        ends = nodes[-1] > 0.75 * furthest  # no line goes on beside the name
        place = {"xytext": (8, 0), "va": "center"} if ends else {"xytext": (4, -5), "va": "top"}
        axes.annotate(name, (nodes[-1], values[-1]), textcoords="offset points", fontsize=10, color=color, **place)
    axes.margins(x=0.02)
    axes.set_xlim(left=0, right=1.62 * axes.get_xlim()[1])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1] / 1.6])
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", color=GRID)
    axes.set_ylabel("S, tokens per step", fontsize=10, color=SOFT)
    _head(axes, f"Tokens per step, by the nodes of a step: {about}", "nodes that a step sends, mean")
    return figure


def _law(points: Sequence[Measured], about: str) -> Any:
    """Measured S by W = G and N, and Eq. 7 with the alpha and f that fit; for N=5 also with those of the paper."""
    figure, axes = _new_figure(4.6)
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
    _legend(axes, MOST_LINES)
    label = f"W = G; dots: measured, lines: α={found.law.alpha:.3f}, f={found.law.f:.3f}"
    _head(axes, f"Measured S, and the law that fits: {about}", label)
    return figure


def _new_figure(height: float) -> tuple[Any, Any]:
    """A figure with one panel; a figure of its own rather than pyplot, which keeps state and may look for a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor=BACK)
    axes = figure.subplots()
    axes.set_facecolor(BACK)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=10.5, length=0)
    axes.set_axisbelow(True)
    return figure, axes


def _head(axes: Any, title: str, label: str) -> None:
    """What it shows, and what the axis below counts."""
    axes.figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    axes.set_xlabel(label, fontsize=10, color=SOFT)


def _legend(axes: Any, columns: int) -> None:
    """Names of what the colours stand for, in lines above the panel."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.3, "frameon": False}
    drawn = axes.legend(**place, ncols=columns, fontsize=9.5, handlelength=1.2, columnspacing=1.2)
    for text in drawn.get_texts():
        text.set_color(INK)


def _note(axes: Any, right: float, place: float, text: str) -> None:
    offset = {"xytext": (6, 0), "textcoords": "offset points"}
    paper = {"facecolor": BACK, "edgecolor": BACK, "pad": 1}  # no line goes through a number
    axes.annotate(text, (right, place), va="center", fontsize=10, color=INK, bbox=paper, **offset)


def _save(figure: Any, path: Path) -> None:
    """Write a figure as SVG that follows the page's colours: the same figure gives the same file."""
    from matplotlib import rc_context

    drawn = StringIO()
    with rc_context({"svg.hashsalt": "lookahead", "svg.fonttype": "path"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        path.write_text(re.sub(r"(<svg[^>]*>)", lambda start: start[1] + style, svg, count=1), encoding="utf-8")
