"""Tables that are more than figures of rows: the fit of the scaling law, and the best published method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lookahead.bench.replay import tables as replay
from lookahead.bench.rows import Row
from lookahead.bench.scaling_law import PAPER_LAW, Measured, fit
from lookahead.bench.summary import MethodSummary, RunSet, summarise

Table = tuple[list[str], list[list[str]]]

LARGE_NGRAM, LARGE_WINDOW = 5, 2
"""From which N, and which W = G, the law may be expected to hold: the paper asks for N large enough."""


def best_published(rows: Sequence[Row]) -> Table:
    """A line for each `"auto"` with a fixed number of nodes, beside the best of the methods that it is made of.

    That is the one with the highest S among those that ran on the same prompts, never send more nodes in a step, draft
    without a second model and keep nothing from prompt to prompt.
    """
    titles = ["task", "method", "nodes at most", "memory", "S", "best published method", "its S", "ratio"]
    return titles, [cells for runs in summarise(rows) for cells in _beside_best(runs)]


def _beside_best(runs: RunSet) -> Iterator[list[str]]:
    for method in runs.methods:
        config: Mapping[str, Any] = method.method_settings.get("lookahead", {})
        budget = config.get("step_budget")
        if method.preset != "auto" or budget is None:
            continue
        rivals = [
            other
            for other in runs.methods
            if _is_published(other) and other.most_nodes <= budget and other.prompts == method.prompts
        ]
        best = max(rivals, key=lambda rival: rival.step_compression, default=None)
        own = [runs.task, method.method, str(budget), str(config["memory"]), f"{method.step_compression:.2f}"]
        if best is None or not best.step_compression:
            yield [*own, "–", "–", "–"]
        else:
            ratio = method.step_compression / best.step_compression
            yield [*own, best.method, f"{best.step_compression:.2f}", f"{ratio:.2f}x"]


def _is_published(method: MethodSummary) -> bool:
    config = method.method_settings.get("lookahead")
    if config is None:
        return bool(method.method_settings["transformers"]) and method.method_settings["assistant"] is None
    return config["preset"] not in ("auto", "autoregressive") and config["memory"] == "request"


def law_points(rows: Sequence[Row], before_cycles: bool = False) -> list[Measured]:
    """S of all sizes with W = G whose pool the window alone fills."""
    points = []
    for method in RunSet(rows).methods:
        config = method.method_settings.get("lookahead", {})
        value = method.before_cycles if before_cycles else method.step_compression
        of_law = config.get("preset") == "paper" and not config["pool_from_prompt"]
        if of_law and value is not None and config["window_size"] == config["guess_set_size"]:
            points.append(Measured(config["window_size"], config["ngram_size"], value))
    return points


def law_fit(rows: Sequence[Row]) -> Table:
    """alpha and f of the scaling law: the paper's, and those that fit these rows."""
    whole = law_points(rows)
    large = [point for point in whole if point.ngram_size >= LARGE_NGRAM and point.window_size >= LARGE_WINDOW]
    fits = {
        "here, whole outputs": whole,
        "here, before the first cycle": law_points(rows, before_cycles=True),
        f"here, whole outputs, without N < {LARGE_NGRAM} and W < {LARGE_WINDOW}": large,
    }
    lines = [["paper: LLaMA-2-Chat-7B, MT-Bench (Fig. 4(b))", f"{PAPER_LAW.alpha}", f"{PAPER_LAW.f}", "not printed"]]
    for name, points in fits.items():
        found = fit(points)
        figures = (found.law.alpha, found.law.f, found.deviation)
        lines.append([f"{name}, {len(points)} sizes", *(f"{figure:.3f}" for figure in figures)])
    return ["fit of Eq. 7", "α", "f", "root mean square deviation of S"], lines


DERIVED: dict[str, Callable[[Sequence[Row]], Table]] = {
    "best published": best_published,
    "law fit": law_fit,
    "replay S": replay.compressions,
    "replay drafts": replay.drafts,
    "replay ratios": replay.ratios,
    "replay equal drafts": replay.equal_drafts,
    "replay speeds": replay.speeds,
    "replay texts": replay.texts,
}
"""Tables by the name that a declaration calls them."""
