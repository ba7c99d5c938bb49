"""Pictures that are readable on light and on dark pages: SVG with colours that follow the reader's."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

from lookahead.bench.results_file import named

BACK, INK, SOFT, GRID = "#ffffff", "#1b1f24", "#59636e", "#d1d9e0"
STRONG, MILD, PALE = "#0a5fb4", "#86b6e4", "#b4bcc6"
LINES = ("#0a5fb4", "#b35c00", "#1a7f37", "#8250df", "#5f6b77")
STACK = ("#dfe4ea", "#c9e0f5", "#95c3ec", "#559fda", "#1f76bf", "#0d4f8b", "#062f57")

_DARK = {
    BACK: "#14181d",
    INK: "#e8edf2",
    SOFT: "#9da7b3",
    GRID: "#3a434d",
    STRONG: "#58a6ff",
    MILD: "#2f6096",
    PALE: "#56616e",
    **dict(zip(LINES[1:], ("#ffa657", "#6bc46d", "#c297ff", "#aab4c0"), strict=True)),
    **dict(zip(STACK, ("#39424d", "#1d3c5c", "#21568a", "#2f78bd", "#4c9be8", "#86c0ff", "#c8e3ff"), strict=True)),
}
"""What each colour is on a dark page."""

WIDTH = 7.6
"""Inches: at the width of a page letters are as large as those of the text."""


def new_figure(height: float) -> tuple[Any, Any]:
    """A figure with one panel; a figure of its own rather than pyplot, which keeps state and may look for a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=BACK)
    axes = figure.subplots()
    axes.set_facecolor(BACK)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=10.5, length=0)
    axes.set_axisbelow(True)
    return figure, axes


def head(axes: Any, title: str, label: str) -> None:
    """What it shows, and what the axis below counts."""
    axes.figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    axes.set_xlabel(label, fontsize=10, color=SOFT)


def legend(axes: Any, columns: int, **options: Any) -> None:
    """Names of what the colours stand for: in lines above the panel, or in one column where bars are shortest."""
    inside = columns == 1
    place = {"loc": "lower right"} if inside else {"loc": "lower left", "bbox_to_anchor": (0, 1.0)}
    drawn = axes.legend(
        **place,
        ncols=columns,
        frameon=inside,
        fontsize=9.5,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.3,
        **options,
    )
    drawn.get_frame().set(facecolor=BACK, edgecolor=BACK, alpha=None)
    for text in drawn.get_texts():
        text.set_color(INK)


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG: the same figure gives the same file."""
    from matplotlib import rc_context

    drawn = StringIO()
    with rc_context({"svg.hashsalt": "lookahead", "svg.fonttype": "path"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    with named(path):
        path.write_text(_following_the_page(drawn.getvalue()), encoding="utf-8")


def _following_the_page(svg: str) -> str:
    """The picture with a rule for each of its colours that says what it is on a dark page."""
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda start: start[1] + style, svg, count=1)
