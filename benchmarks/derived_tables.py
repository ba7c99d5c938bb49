"""Tables that are more than figures of rows: the scaling law, the best published method, and replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lookahead.bench.rows import Row
from lookahead.bench.scaling_law import law_fit
from lookahead.bench.summary import MethodSummary, RunSet, summarise
from replay import tables as replay

Table = tuple[list[str], list[list[str]]]


def best_published(rows: Sequence[Row]) -> Table:
    """A line for each `"auto"` with a fixed number of nodes, beside the best of the methods that it is made of.

    That is the one with the highest S among those that ran on the same prompts, never send more nodes in a step, draft
    without a second model and keep nothing from prompt to prompt.
    """
    titles = ["task", "method", "nodes at most", "in cycles", "S", "best published method", "its S", "ratio"]
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
        cycles, compression = f"{method.cycle_share:.0%}", f"{method.step_compression:.2f}"
        own = [runs.task, method.method, str(budget), cycles, compression]
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


DERIVED: dict[str, Callable[[Sequence[Row]], Table]] = {
    "best published": best_published,
    "law fit": law_fit,
    "replay S": replay.compressions,
    "replay ratios": replay.ratios,
    "replay equal drafts": replay.equal_drafts,
    "replay texts": replay.texts,
}
"""Tables by the name that a declaration calls them."""
