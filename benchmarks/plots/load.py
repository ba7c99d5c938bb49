"""What a load generator saw of servers: rows of `python benchmarks load`."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from lookahead.bench.results_file import read_lines
from plots.picture import INK, MILD, PALE, STRONG, head, legend, new_figure, save

SERVERS = {"lookahead serve": STRONG, "lookahead serve, no drafts": MILD, "transformers serve": PALE}
_BAR = 0.26


def draw(results: Path, path: Path) -> None:
    """Bars of tokens per second for each number of users: medians of the repeats, and lines from least to most."""
    rows = [row for row in read_lines(results) if row["kind"] == "run"]
    users = sorted({row["users"] for row in rows})
    figure, axes = new_figure(3.6)
    for place, (server, color) in enumerate(SERVERS.items()):
        for row, count in enumerate(users):
            found = [each["tokens_per_second"] for each in rows if (each["server"], each["users"]) == (server, count)]
            middle, at = median(found), row + (place - 1) * _BAR
            axes.barh(at, middle, _BAR * 0.88, color=color, label=server if row == 0 else None)
            axes.plot([min(found), max(found)], [at, at], color=INK, linewidth=1)
            axes.text(max(found), at, f" {middle:.0f}", va="center", fontsize=9.5, color=INK)
    axes.set_yticks(range(len(users)), [f"{count} users" if count > 1 else "1 user" for count in users])
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.06)
    head(axes, "Tokens per second that users of a server get", "tokens per second, all users together")
    legend(axes, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
