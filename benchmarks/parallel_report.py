"""Write the table and the plot of docs/parallel.md from what `benchmarks/parallel.py` counted and measured.

    python benchmarks/parallel_report.py [--results benchmarks/results/parallel-demo.jsonl] [--output docs/parallel.md]

The table goes between the two marks of the page; what stands around them is left as it is. The plot is a prediction,
and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lookahead.core.cost_model import CostModel

BEGIN = "<!-- From here to the next mark written by benchmarks/parallel_report.py; do not edit by hand. -->"
END = "<!-- End of what benchmarks/parallel_report.py writes. -->"

ALPHA, GOOD_EVERY = 0.425, 3.106
"""The paper's fit of its scaling law to LLaMA-2-Chat-7B on MT-Bench: acceptance rate and f (Figure 4 (b))."""

WINDOW, NGRAM = 15, 5
"""W = G and N of the paper for a 7B model (Table 4)."""

DEVICES = range(1, 9)

StepTime = Callable[[float], float]
"""Seconds of a step, by its nodes."""

A100_NODE = 2 * 7e9 / (312e12 * 0.5)
"""Seconds of arithmetic for a node of a 7B model, at half of an A100's 312 TFLOP/s."""
A100_STEP = 2 * 7e9 / 1.555e12
"""Seconds that reading 7B half-precision weights once takes an A100 of 40 GB (1.555 TB/s)."""

Row = dict[str, Any]


def main() -> int:
    """Write the page and the plot."""
    options = _parse()
    rows = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    curve = [row for row in rows if row["kind"] == "curve"][-1]
    cost = CostModel.fit((point["nodes"], point["context"], point["seconds"]) for point in curve["points"])
    context = curve["points"][0]["context"]
    curves: dict[str, StepTime] = {
        "a CPU thread and the demo model (measured curve)": lambda nodes: _between(cost, nodes, context),
        "an A100 and a 7B model (roofline, not measured)": lambda nodes: max(A100_STEP, nodes * A100_NODE),
    }
    text = "\n\n".join([_traffic(rows), _predictions(curves)])
    page = options.output.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    options.output.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    _plot(curves, options.plot)
    return 0


def step_compression(guesses: int, ngram: int) -> float:
    """S of the scaling law (Eq. 5 and 7) with `guesses` = W = G and N-1 tokens in each."""
    gamma = ngram - 1
    expected = (gamma + 1) - sum((1 - ALPHA**i) ** guesses for i in range(1, gamma + 1))
    return (GOOD_EVERY - 1 + expected) / GOOD_EVERY


def largest_load(devices: int, window: int, ngram: int) -> float:
    """Nodes of the fullest rank: an equal share of (W + G)(N-1) nodes, the root, and half of the trunk if W is cut."""
    share = 2 * window * (ngram - 1) / devices
    return share + 1 if devices == 1 else share + 1 + window / 4


def speed_up(step_time: StepTime, devices: int, window: int, ngram: int) -> float:
    """Predicted tokens per second over plain decoding on one such device."""
    return step_compression(window, ngram) * step_time(1) / step_time(largest_load(devices, window, ngram))


def predictions(step_time: StepTime, devices: int) -> dict[str, float]:
    """Predicted speed-ups by the choice of W = G and N."""
    sizes = [(window, ngram) for window in range(1, 121) for ngram in range(2, 13)]
    return {
        f"W = G = {WINDOW}, N = {NGRAM} in all": speed_up(step_time, devices, WINDOW, NGRAM),
        f"W = G = {WINDOW} a device, N = {NGRAM}": speed_up(step_time, devices, WINDOW * devices, NGRAM),
        "best W = G and N": max(speed_up(step_time, devices, window, ngram) for window, ngram in sizes),
    }


def _between(cost: CostModel, nodes: float, context: int) -> float:
    low = int(nodes)
    return cost.step_time(low, context) + (nodes - low) * (
        cost.step_time(low + 1, context) - cost.step_time(low, context)
    )


def _traffic(rows: list[Row]) -> str:
    lines = [
        "| ranks | W, N, G | tokens | nodes, by rank | fullest | in duplicate | exchanges a step | bytes, mean | "
        "bytes, most | S |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row["kind"] != "traffic":
            continue
        sizes = ", ".join(map(str, row["sizes"])) if row["preset"] == "paper" else f"`{row['preset']}`"
        sizes += " (scaled)" if row["scaled"] and row["preset"] == "paper" else ""
        loads = " ".join(f"{load:.0f}" for load in row["loads"])
        cells = [
            str(row["ranks"]),
            sizes,
            "drawn" if row["do_sample"] else "greedy",
            loads,
            f"{row['largest']:.1f}",
            f"{row['redundant']:.1f}",
            f"{row['exchanges'] / row['steps']:.2f}",
            f"{row['bytes_per_step']:.0f}",
            str(row["most_bytes"]),
            f"{row['step_compression']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _predictions(curves: dict[str, StepTime]) -> str:
    lines = ["| **predicted** speed-up over plain decoding, by devices | " + " | ".join(map(str, DEVICES)) + " |"]
    lines.append("|---|" + "---:|" * len(DEVICES))
    for name, step_time in curves.items():
        columns = [predictions(step_time, devices) for devices in DEVICES]
        for choice in columns[0]:
            lines.append(f"| {name}, {choice} | " + " | ".join(f"{column[choice]:.2f}" for column in columns) + " |")
    return "\n".join(lines)


def _plot(curves: dict[str, StepTime], path: Path) -> None:
    # A figure of its own rather than pyplot, which keeps state for the process and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, step_time) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        columns = [predictions(step_time, devices) for devices in DEVICES]
        for choice, style in zip(columns[0], ("--", ":", "-"), strict=True):
            values = [column[choice] for column in columns]
            axes.plot(list(DEVICES), values, style, color=colour, marker=".", label=f"prediction: {name}, {choice}")
    axes.plot([1], [1.9], "k^", label="paper, Fig. 6: 7B, MT-Bench, 1 A100, FlashAttention")
    axes.plot([8], [4.0], "ks", label="paper: 7B, ClassEval, up to 4x on 8 A100")
    axes.fill_between([1, 8], 0.75, 0.82, color="grey", alpha=0.4, label="paper: tensor and pipeline parallelism")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens per second over plain decoding on one")
    axes.set_title("Lookahead parallelism: PREDICTED speed-up (Eq. 5 and 7), beside the paper's claims")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=130)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/parallel-demo.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("docs/parallel.md"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images/parallel-prediction.png"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
