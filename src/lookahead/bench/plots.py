"""Plots of a benchmark: S, accepted lengths, and speed, a panel for each task; the scaling law where it fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.bench.derived_tables import law_points
from lookahead.bench.scaling_law import PAPER_LAW, Measured, fit
from lookahead.bench.summary import MethodSummary, Ratio, RunSet
from lookahead.errors import InvalidArgumentError

_LENGTHS = ((1, 1, "1"), (2, 2, "2"), (3, 3, "3"), (4, 4, "4"), (5, 6, "5–6"), (7, 10, "7–10"), (11, None, "11+"))
"""Classes of accepted lengths: from, to, label."""

_ONE_TOKEN = "#e2e2e2"
"""Colour of steps that brought no more than plain decoding does."""

_COLORS = {"lookahead, auto": "#1f5fa8", "lookahead, other methods": "#8db8e0", "transformers": "#a3a3a3"}
"""Whose method a bar is."""

_PANEL_WIDTH, _BAR_HEIGHT, _MOST_COLUMNS = 4.2, 0.34, 3
"""Width of a panel and height of a bar in inches; most panels side by side."""


def check_plots(folder: Path) -> None:
    """Refuse plots that could not be drawn.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or the folder is a file.
    """
    require_matplotlib("--plots", folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgumentError(f"--plots {folder}: is a file; give the name of a folder")


def require_matplotlib(option: str, path: Path) -> None:
    """Refuse an option that draws into `path` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            f"{option} {path} needs matplotlib: pip install 'lookahead-decoding[plot]', or leave {option} out"
        )


def draw(summaries: Sequence[RunSet], folder: Path) -> list[Path]:
    """Draw PNG files for each model into `folder`, which is made if it is not there; returns them.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for model in dict.fromkeys(summary.model for summary in summaries):
        of_model = [summary for summary in summaries if summary.model == model]
        clock = "CPU time" if of_model[0].clock == "cpu" else "wall time"
        for name, panel, title, label in (
            ("S", _compression, "Tokens per step", "S; black mark: before the first repeated cycle"),
            ("accepted", _lengths, "Tokens that a step adds", "share of the steps that add 1, 2, … tokens"),
            (
                "speed",
                _speed,
                "Speed over transformers' plain decoding",
                f"{clock} per token: median and quartiles",
            ),
        ):
            path = folder / f"{_file_name(model)}-{name}.png"
            _figure(of_model, panel, f"{title}, {model}", label).savefig(path, format="png", dpi=100)
            drawn.append(path)
        for summary in of_model:
            points = law_points(summary.rows)
            if len({point.window_size for point in points}) > 1:
                drawn.append(folder / f"{_file_name(f'{model}-{summary.task}')}-law.png")
                _law(points, f"{model}, {summary.task}").savefig(drawn[-1], format="png", dpi=100)
    return drawn


def _law(points: Sequence[Measured], title: str) -> Any:
    """Measured S by W = G and N, and Eq. 7 with the alpha and f that fit; for N=5 also with those of the paper."""
    from matplotlib.figure import Figure

    figure, found = Figure(figsize=(8, 4.8), layout="constrained"), fit(points)
    axes = figure.subplots()
    sizes = range(1, max(point.window_size for point in points) + 1)
    for length in sorted({point.ngram_size for point in points}):
        of_length = [point for point in points if point.ngram_size == length]
        law = [found.law.step_compression(size, length) for size in sizes]
        (line,) = axes.plot(sizes, law, label=f"N={length}: law (line), measured (dots)")
        measured = [point.step_compression for point in of_length]
        axes.plot([point.window_size for point in of_length], measured, "o", color=line.get_color())
    theirs = [PAPER_LAW.step_compression(size, 5) for size in sizes]
    axes.plot(sizes, theirs, "--", color="#555555", label=f"N=5, the paper's: α={PAPER_LAW.alpha}, f={PAPER_LAW.f}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("W = G")
    axes.set_ylabel("S, tokens per step")
    axes.set_ylim(bottom=1)
    axes.set_title(f"S, and the law that fits, {title}: α={found.law.alpha:.3f}, f={found.law.f:.3f}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)
    return figure


def _figure(summaries: Sequence[RunSet], panel: Callable[[Any, RunSet], None], title: str, label: str) -> Any:
    """A figure with a panel for each task; methods from top to bottom, named on the left."""
    # A figure of its own rather than pyplot, which keeps state for the process and may look for a screen.
    from matplotlib.figure import Figure

    columns = 2 if len(summaries) == 4 else min(len(summaries), _MOST_COLUMNS)
    rows = -(-len(summaries) // columns)
    methods = max(len(summary.methods) for summary in summaries)
    names = max(len(method.method) for summary in summaries for method in summary.methods)
    same = len({tuple(method.method for method in summary.methods) for summary in summaries}) == 1
    size = (
        0.085 * names * (1 if same else columns) + _PANEL_WIDTH * columns,
        (_BAR_HEIGHT * methods + 0.9) * rows + 1.0,
    )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(summaries):
            axes.axis("off")
            continue
        summary = summaries[number]
        panel(axes, summary)
        axes.set_title(summary.task, fontsize=11)
        named = number % columns == 0 or not same  # once is enough where all panels have the same methods
        labels = [method.method if named else "" for method in summary.methods]
        axes.set_yticks(range(len(summary.methods)), labels)
        axes.set_ylim(len(summary.methods) - 0.4, -0.6)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=13)
    for axes in grid.flat[max(0, len(summaries) - columns) : len(summaries)]:  # the lowest of each column
        axes.set_xlabel(label, fontsize=9.5)
    handles, kinds = _legend(grid.flat[0], summaries)
    figure.legend(handles, kinds, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9)
    return figure


def _legend(axes: Any, summaries: Sequence[RunSet]) -> tuple[list[Any], list[str]]:
    """What the colours say: what the panel itself has named, or whose methods the bars are."""
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        kinds = {_kind(method) for summary in summaries for method in summary.methods}
        labels = [kind for kind in _COLORS if kind in kinds]
        handles = [Patch(color=_COLORS[kind]) for kind in labels]
    return handles, labels


def _compression(axes: Any, summary: RunSet) -> None:
    values = [method.step_compression for method in summary.methods]
    _bars(axes, values, summary.methods)
    for place, method in enumerate(summary.methods):
        if method.before_cycles is not None:
            axes.plot([method.before_cycles] * 2, [place - 0.36, place + 0.36], color="black", linewidth=2)
        right = max(method.step_compression, method.before_cycles or 0)
        _note(axes, right, place, f"{method.step_compression:.2f}")
    axes.set_xlim(0, 1.18 * max([1.0, *values, *(method.before_cycles or 0 for method in summary.methods)]))
    axes.grid(axis="x", alpha=0.3)


def _speed(axes: Any, summary: RunSet) -> None:
    ratios = [method.over_reference or Ratio(0, 0, 0) for method in summary.methods]
    _bars(axes, [ratio.median for ratio in ratios], summary.methods)
    for place, ratio in enumerate(ratios):
        axes.plot([ratio.lower, ratio.upper], [place, place], color="black", linewidth=1.5)
        _note(axes, max(ratio.upper, ratio.median), place, f"{ratio.median:.2f}x" if ratio.median else "not measured")
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.22 * max([1.0, *(ratio.upper for ratio in ratios)]))
    axes.grid(axis="x", alpha=0.3)


def _lengths(axes: Any, summary: RunSet) -> None:
    from matplotlib import colormaps

    colors = colormaps["YlGnBu"]
    left = [0.0] * len(summary.methods)
    for number, (least, most, label) in enumerate(_LENGTHS):
        shares = [_share(method, least, most) for method in summary.methods]
        color = _ONE_TOKEN if number == 0 else colors(0.25 + 0.75 * number / (len(_LENGTHS) - 1))
        axes.barh(range(len(shares)), shares, left=left, height=0.72, color=color, label=label)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _share(method: MethodSummary, least: int, most: int | None) -> float:
    steps = sum(method.accepted.values())
    within = sum(
        count for length, count in method.accepted.items() if length >= least and (most is None or length <= most)
    )
    return within / steps if steps else 0.0


def _bars(axes: Any, values: Sequence[float], methods: Sequence[MethodSummary]) -> None:
    axes.barh(range(len(values)), values, height=0.72, color=[_COLORS[_kind(method)] for method in methods])


def _kind(method: MethodSummary) -> str:
    if method.preset is None:
        return "transformers"
    return "lookahead, auto" if method.preset == "auto" else "lookahead, other methods"


def _note(axes: Any, x: float, y: int, text: str) -> None:
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # where lines would cross the figures
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=behind)


def _file_name(name: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.-]+", "-", name)
