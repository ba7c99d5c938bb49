"""The plot of `lookahead tune`: time of a step against nodes, with the memory limit below it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lookahead.backends.transformers.tuning import Measurement
from lookahead.core.cost_model import CostModel
from lookahead.errors import InvalidArgumentError


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be made.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            f"--plot {path} needs matplotlib: pip install 'lookahead-decoding[plot]', or leave --plot out"
        )
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"--plot {path}: no such folder; make {path.parent} first")
    if path.is_dir():
        raise InvalidArgumentError(f"--plot {path}: is a folder; give the name of a PNG file")


def draw(path: Path, measured: Measurement, cost: CostModel, title: str) -> None:
    """Draw points, fitted curves and the memory limit into a PNG file."""
    # A figure of its own rather than pyplot, which keeps state for the process and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    most = max(point.nodes for point in measured.points)
    sizes = np.unique(np.geomspace(1, most, 200).round().astype(np.int64))
    for context in sorted({point.context for point in measured.points}):
        points = [point for point in measured.points if point.context == context]
        (line,) = axes.plot(sizes, 1000 * cost.step_time(sizes, context), label=f"context {context:,}, fit")
        axes.plot(
            [point.nodes for point in points],
            [1000 * point.seconds for point in points],
            "o",
            color=line.get_color(),
            label=f"context {context:,}, measured",
        )
    label = f"memory limit: reading the weights once, {measured.bandwidth / 1e9:.1f} GB/s"
    axes.axhline(1000 * measured.limit, color="black", linestyle="--", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes of the step")
    axes.set_ylabel(f"{'CPU' if measured.clock == 'cpu' else 'wall'} time of the step, ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
