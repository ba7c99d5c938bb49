"""How many tokens a step brings, by the kind of work: rows of `python benchmarks replay`.

Recorded answers of large models, drafts from text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lookahead.bench.results_file import read_lines
from lookahead.bench.rows import Row
from plots.picture import GRID, INK, MILD, SOFT, STRONG, head, legend, new_figure, save

WORK = {"answers": "answers in a chat", "code_edits": "edits of code", "agent_traces": "steps of agents"}
METHOD, SIZE = "auto, text only", "tree of 32"
MEMORIES = {
    "drafts from earlier requests as well": (True, STRONG),
    "drafts from its own prompt and text": (False, MILD),
}
HEIGHT = 0.36


def tokens_per_step(rows: Sequence[Row], task: str, across: bool) -> float:
    """S over all recordings of a file."""
    found = [row for row in rows if (row.get("task"), row.get("method"), row.get("across")) == (task, METHOD, across)]
    drafts = [draft for row in found for draft in row["drafts"] if draft["size"] == SIZE]
    return float(sum(row["tokens"] for row in found) / sum(draft["steps"] for draft in drafts))


def draw(results: Path, folder: Path) -> None:
    """One picture, with a pair of bars for each kind of work."""
    rows = list(read_lines(results))
    figure, axes = new_figure(2.9)
    for number, (label, (across, color)) in enumerate(MEMORIES.items()):
        places = [place + HEIGHT * (0.5 - number) for place in range(len(WORK))]
        values = [tokens_per_step(rows, task, across) for task in WORK]
        axes.barh(places, values, height=HEIGHT, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            text = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 10, "color": INK}
            axes.annotate(f"{value:.1f}", (value, place), **text)
    axes.set_yticks(range(len(WORK)), list(WORK.values()))
    axes.axvline(1, color=SOFT, linestyle="--", linewidth=1)
    axes.grid(axis="x", color=GRID)
    legend(axes, 2)
    head(axes, "Tokens per step on real answers, by the kind of work", "S, tokens per step; plain decoding has 1")
    folder.mkdir(parents=True, exist_ok=True)
    save(figure, folder / "kinds-of-work.svg")
