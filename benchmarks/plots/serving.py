"""Which share of an engine's nodes are drafts, by the number of requests at once: rows of `python benchmarks serving`.

A step of many requests is counted under the load that it had, as others leave before the last one is through.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from lookahead.bench.results_file import read_lines
from lookahead.bench.rows import Row
from plots.picture import GRID, LINES, SOFT, head, legend, new_figure, save

NAMES = {"demo": "demo model", "random": "random, 461 million parameters"}


def shares(rows: list[Row]) -> dict[int, float]:
    """The share of nodes that were drafts, by the rows of a step."""
    nodes: dict[int, int] = defaultdict(int)
    roots: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.get("method") == "drafts":
            for load, (sent, served) in row["by_load"].items():
                nodes[int(load)] += sent
                roots[int(load)] += served
    return {load: max(1 - roots[load] / nodes[load], 0.0) for load in sorted(nodes)}


def name_of(header: Row) -> str:
    """What a line is called."""
    how = f"temperature {header['temperature']:g}" if header["temperature"] else "greedy"
    return f"{NAMES.get(header['model'], header['model'])}, {how}"


def draw(files: list[Path], folder: Path) -> None:
    """One plot, with a line for each file."""
    found = [(rows[0], shares(rows)) for rows in map(read_lines, files)]
    found = [(header, line) for header, line in found if line]
    found.sort(key=lambda each: (each[0]["model"], each[0]["temperature"]))
    figure, axes = new_figure(3.6)
    loads = sorted({load for _, line in found for load in line})
    for color, (header, line) in zip(LINES, found, strict=False):
        axes.plot(
            list(line), list(line.values()), "o-", color=color, linewidth=2.2, markersize=6, label=name_of(header)
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) if load < 3 else f"{load // 2 + 1}–{load}" for load in loads])
    axes.minorticks_off()
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_ylim(-0.03, 1)
    axes.grid(axis="y", color=GRID)
    axes.set_ylabel("drafts among the nodes", fontsize=10, color=SOFT)
    legend(axes, 2)
    head(axes, "Share of an engine's nodes that are drafts, by load", "requests in a step")
    folder.mkdir(parents=True, exist_ok=True)
    save(figure, folder / "nodes.svg")
