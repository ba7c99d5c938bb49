"""Draw the plots of the pages: NAME.svg for light pages and NAME-dark.svg for dark ones.

    python benchmarks plots docs/images

The plots show rows of this repository: S by the nodes of a step, the scaling law, and S of replayed answers by kind of
work.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from lookahead.bench.rows import Row, named, read_lines
from lookahead.bench.scaling_law import PAPER_LAW, fit, law_points
from lookahead.bench.summary import MethodSummary, RunSet
from lookahead.errors import InvalidArgumentError, extra_hint

RESULTS = Path(__file__).parent / "results"

MOST_LINES = 5

BACK, INK, SOFT, GRID = "#ffffff", "#1b1f24", "#59636e", "#d1d9e0"
MARKERS = ("o", "s", "^", "D", "v")
LINES = ("#0a5fb4", "#b35c00", "#1a7f37", "#8250df", "#5f6b77")
MILD = "#86b6e4"

_DARK = {
    BACK: "#14181d",
    INK: "#e8edf2",
    SOFT: "#9da7b3",
    GRID: "#3a434d",
    MILD: "#2f6096",
    **dict(zip(LINES, ("#58a6ff", "#ffa657", "#6bc46d", "#c297ff", "#aab4c0"), strict=True)),
}
"""Colours on a dark page, by colour on a light one."""

_WIDTH = 7.6
"""Width in inches; letters then have the size of the page's text."""

STYLE: dict[str, Any] = {
    "figure.facecolor": BACK,
    "axes.facecolor": BACK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.labelsize": 10,
    "axes.labelcolor": SOFT,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("color", INK), ("labelsize", 10.5))},
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.hashsalt": "lookahead",
    "svg.fonttype": "path",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.3,
    "legend.labelcolor": INK,
}
"""Settings of matplotlib; with them the same figure gives the same file."""

_SIZED = re.compile(r"^(.*?), (\d+)(, .*)?$")
"""Parts of the name of a method with several sizes: name, size, rest of the name."""

WORK = {"agent_traces": "steps of agents", "code_edits": "edits of code", "answers": "answers in a chat"}
MEMORIES = {True: "drafts from earlier requests as well", False: "drafts from its own prompt and text"}
REPLAYED = {"kind": "replay", "method": "auto, text only", "size": "tree of 32"}


def draw_plots(arguments: Sequence[str], notes: Console) -> int:
    """Draw the plots of the pages from the rows of this repository.

    Returns:
        The exit status.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or the folder is a file.
        OSError: A plot cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks plots", description=draw_plots.__doc__)
    parser.add_argument("folder", type=Path, help="folder for the plots, with a subfolder for each page")
    folder = parser.parse_args(arguments).folder
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError(f"plots in {folder} need matplotlib; {extra_hint('plot')}")
    if folder.exists() and not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is a file; give the name of a folder")
    from matplotlib import rc_context

    plots = {
        "bench/stories260k-S.svg": (("bench/stories.jsonl", "bench/published-stories.jsonl"), sizes),
        "paper/stories260k-stories-law.svg": (("bench/paper-grid.jsonl",), law),
        "replay/kinds-of-work.svg": (("replay.jsonl",), kinds_of_work),
    }
    with rc_context(STYLE):
        for name, (sources, draw) in plots.items():
            save(draw([row for source in sources for row in read_lines(RESULTS / source)]), folder / name)
    notes.print(f"plots written into {folder}", soft_wrap=True)
    return 0


def kinds_of_work(rows: Sequence[Row]) -> Any:
    """Plot S on recorded answers by kind of work, as pairs of bars: with a memory for all requests and without."""
    rows = [row for row in rows if REPLAYED.items() <= row.items()]
    text = "Tokens per step on real answers, by the kind of work", "S, tokens per step; plain decoding has 1"
    figure, axes = _new_figure(2.9, text)
    for offset, color, (across, label) in zip((-0.18, 0.18), (LINES[0], MILD), MEMORIES.items(), strict=True):
        groups = [[row for row in rows if (row["task"], row["across"]) == (task, across)] for task in WORK]
        values = [sum(row["tokens"] for row in group) / sum(row["steps"] for row in group) for group in groups]
        places = [place + offset for place in range(len(WORK))]
        bars = axes.barh(places, values, 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=6, fontsize=10, color=INK)
    axes.set_yticks(range(len(WORK)), list(WORK.values()))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    axes.grid(axis="x")
    _legend(axes, 2)
    return figure


def sizes(rows: Sequence[Row]) -> Any:
    """Plot S of greedy texts by the nodes of a step, with a line for each of the best methods."""
    greedy = [row for row in rows if not row["settings"]["task"]["sampling"]]
    groups: dict[str, list[MethodSummary]] = {}
    for method in RunSet(greedy).methods:
        if sized := _SIZED.match(method.method):
            groups.setdefault(sized[1] + (sized[3] or ""), []).append(method)
    several = {name: group for name, group in groups.items() if len(group) > 2}
    best = sorted(several, key=lambda name: -max(method.step_compression for method in several[name]))[:MOST_LINES]
    title = f"Tokens per step, by the nodes of a step: {greedy[0]['model']}, {greedy[0]['task']}"
    figure, axes = _new_figure(4.2, (title, "nodes that a step sends, mean"))
    furthest = max(method.mean_nodes for name in best for method in several[name])
    for color, name in zip(LINES, best, strict=False):
        nodes = [method.mean_nodes for method in several[name]]
        values = [method.step_compression for method in several[name]]
        axes.plot(nodes, values, "o-", color=color, linewidth=2.2, markersize=6)
        ends = nodes[-1] > 0.75 * furthest  # no other line passes the label
        place = {"xytext": (8, 0), "va": "center"} if ends else {"xytext": (4, -5), "va": "top"}
        axes.annotate(name, (nodes[-1], values[-1]), textcoords="offset points", fontsize=10, color=color, **place)
    axes.margins(x=0.02)
    axes.set_xlim(left=0, right=1.62 * axes.get_xlim()[1])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1] / 1.6])
    _of_S(axes, "y")
    return figure


def law(rows: Sequence[Row]) -> Any:
    """Plot measured S by W = G and N, and Eq. 7 with fitted alpha and f; for N=5 also with the paper's."""
    rows = [row for row in rows if (row["model"], row["task"]) == ("stories260k", "stories")]
    points = law_points(rows)
    best, _ = fit(points)
    tried = ", ".join(map(str, sorted({point.window_size for point in points})))
    label = f"W = G; points: measured at {tried}; lines: α={best.alpha:.3f}, f={best.f:.3f}"
    figure, axes = _new_figure(4.6, ("Measured S, and the law that fits: stories260k, stories", label))
    windows = range(1, max(point.window_size for point in points) + 1)
    lengths = sorted({point.ngram_size for point in points})[: MOST_LINES - 1]
    for number, (color, length) in enumerate(zip(LINES, lengths, strict=False)):
        of_length = [point for point in points if point.ngram_size == length]
        curve = [best.step_compression(size, length) for size in windows]
        axes.plot(windows, curve, color=color, linewidth=2, label=f"N={length}")
        measured = [point.step_compression for point in of_length]
        beside = 2 ** (0.1 * (number - 0.5 * (len(lengths) - 1)))  # so that points do not overlap
        sizes = [point.window_size * beside for point in of_length]
        axes.plot(sizes, measured, MARKERS[number], color=color, markersize=6)
    theirs = [PAPER_LAW.step_compression(size, 5) for size in windows]
    name = f"N=5, the paper's α={PAPER_LAW.alpha}, f={PAPER_LAW.f}"
    axes.plot(windows, theirs, "--", color=LINES[-1], linewidth=2, label=name)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _of_S(axes, "both")
    _legend(axes, MOST_LINES)
    return figure


def _of_S(axes: Any, grid: str) -> None:
    """Set up the vertical axis for S."""
    axes.set_ylim(bottom=1)
    axes.grid(axis=grid)
    axes.set_ylabel("S, tokens per step")


def _new_figure(height: float, text: tuple[str, str]) -> tuple[Any, Any]:
    """Make a figure with one panel; `text` is its title and the label of the horizontal axis.

    It is not made with pyplot, which keeps global state and may look for a screen.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(text[0], x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    axes.set_xlabel(text[1])
    return figure, axes


def _legend(axes: Any, columns: int) -> None:
    """Put the legend above the panel."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns)


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, once in light and once in dark colours."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    light = drawn.getvalue()
    dark = re.sub("|".join(_DARK), lambda color: _DARK[color[0]], light)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, svg in ((path, light), (path.with_name(f"{path.stem}-dark.svg"), dark)):
        with named(file):
            file.write_text(svg, encoding="utf-8")
