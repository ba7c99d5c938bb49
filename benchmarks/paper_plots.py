"""The plots of docs/paper.md: S against W, N and G, the fitted law, and accepted lengths by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.bench.scaling_law import PAPER_LAW, Fit, Measured
from write_results import ResultsError

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
"""Colours that most colour-blind readers tell apart."""


def check_plots() -> None:
    """Refuse plots that could not be drawn.

    Raises:
        ResultsError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ResultsError("drawing needs matplotlib: pip install 'lookahead-decoding[plot]'")


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    # A figure of its own rather than pyplot, which keeps state for the process and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharey=True, squeeze=False)


def _sizes_axis(axes: Any, sizes: Sequence[int], name: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)


def draw_sizes(path: Path, square: Sequence[Measured], sides: Mapping[str, Mapping[int, float]], title: str) -> None:
    """S against W = G for several N (Fig. 4(a)); beside it against W alone and G alone.

    Args:
        path: PNG file to write.
        square: Measured S with W = G.
        sides: Axis label of a side, and S by size.
        title: What was measured.
    """
    figure, grid = _figure(11, 4.4, columns=2)
    both, single = grid[0]
    lengths = sorted({point.ngram_size for point in square})
    for colour, length in zip(COLOURS, lengths, strict=False):
        points = sorted((p for p in square if p.ngram_size == length), key=lambda point: point.window_size)
        xs, ys = [p.window_size for p in points], [p.step_compression for p in points]
        both.plot(xs, ys, "o-", color=colour, label=f"N={length}")
    _sizes_axis(both, sorted({point.window_size for point in square}), "W = G")
    both.set_ylabel("S, tokens per step")
    both.set_title("both branches grow together", size=10)
    for (name, values), colour, marker in zip(sides.items(), COLOURS[3:], "os", strict=False):
        xs = sorted(values)
        single.plot(xs, [values[x] for x in xs], f"{marker}-", color=colour, label=name)
    if sides:
        _sizes_axis(single, sorted({size for values in sides.values() for size in values}), "W or G")
        single.set_title("one branch grows, N=5", size=10)
        single.legend()
    both.set_ylim(bottom=1)
    both.legend()
    figure.suptitle(title, size=11)
    figure.savefig(path, format="png", dpi=130)


def draw_law(path: Path, square: Sequence[Measured], fitted: Fit, title: str) -> None:
    """Measured S with W = G, and Eq. 7 with the fitted alpha and f (Fig. 4(b)); the paper's own curve for N=5."""
    figure, grid = _figure(8, 4.8)
    axes = grid[0][0]
    widest = max(point.window_size for point in square)
    sizes = list(range(1, widest + 1))
    for colour, length in zip(COLOURS, sorted({point.ngram_size for point in square}), strict=False):
        points = [point for point in square if point.ngram_size == length]
        axes.plot([p.window_size for p in points], [p.step_compression for p in points], "o", color=colour)
        law = [fitted.law.step_compression(size, length) for size in sizes]
        axes.plot(sizes, law, "-", color=colour, label=f"N={length}: law (line), measured (dots)")
    theirs = [PAPER_LAW.step_compression(size, 5) for size in sizes]
    label = f"N=5, the paper's law: α={PAPER_LAW.alpha}, f={PAPER_LAW.f}"
    axes.plot(sizes, theirs, "--", color="#555555", label=label)
    _sizes_axis(axes, sorted({point.window_size for point in square}), "W = G = b")
    axes.set_ylabel("S, tokens per step")
    axes.set_ylim(bottom=1)
    axes.set_title(title, size=10.5)
    axes.legend(fontsize=8.5)
    figure.savefig(path, format="png", dpi=130)


def draw_lengths(path: Path, tasks: Mapping[str, Mapping[str, Mapping[int, int]]], title: str) -> None:
    """How many tokens the steps gave, a panel for each task.

    Args:
        path: PNG file to write.
        tasks: Title of a panel; in it, by method, how many steps gave so many tokens.
        title: What was measured.
    """
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = _figure(3.7 * columns, 2.7 * rows + 0.6, columns, rows)
    panels = [axes for row in grid for axes in row]
    longest = max(max(lengths) for methods in tasks.values() for lengths in methods.values())
    bars = range(1, longest + 1)
    for axes, (name, methods) in zip(panels, tasks.items(), strict=False):
        width = 0.8 / len(methods)
        for number, (method, lengths) in enumerate(methods.items()):
            steps = sum(lengths.values())
            places = [length + (number - (len(methods) - 1) / 2) * width for length in bars]
            shares = [100 * lengths.get(length, 0) / steps for length in bars]
            axes.bar(places, shares, width, color=COLOURS[number], label=method)
        axes.set_xticks(bars)
        axes.set_title(name, size=9.5)
        axes.grid(alpha=0.3, axis="y")
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("share of steps, %")
    figure.supxlabel("tokens that a step gave", size=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncol=len(labels), fontsize=9, title=title)
    figure.savefig(path, format="png", dpi=130)
