"""`lookahead tune`: measure step times on this machine, print them, and store their curve for later runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from lookahead.backends.loading import LoadedModel
from lookahead.backends.transformers.findings import describe_setting, store_costs
from lookahead.bench.tuning import CONTEXTS, NODE_COUNTS, Point, clock_of, measure, timings
from lookahead.cli import process, signals
from lookahead.cli.loading import load_model, memory_errors_explained
from lookahead.cli.rendering import Consoles, measuring_progress, print_json
from lookahead.cli.settings import TuneSettings
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.core.step_costs import StepCosts
from lookahead.errors import InvalidArgumentError


def run(settings: TuneSettings, consoles: Consoles) -> int:
    """Measure step times, print and store them, and return the exit code."""
    nodes = sorted({1, *(settings.nodes or NODE_COUNTS)})
    if nodes[-1] > MAX_NODES_PER_STEP:
        raise InvalidArgumentError(f"--nodes {nodes[-1]} is out of range; a step has at most {MAX_NODES_PER_STEP}")
    loaded = load_model(settings, consoles.notes)
    signals.raise_on_interrupt()
    contexts = fitting_contexts(settings.context, loaded, consoles.notes)
    try:
        points = measured_steps(loaded, nodes, contexts, settings.repeats, settings.pack_weights, consoles.notes)
    except KeyboardInterrupt:
        consoles.notes.print("interrupted; nothing is stored")
        return signals.INTERRUPTED
    cost, clock = curve(points), clock_of(loaded.model.device)
    stored = keep_curve(loaded, points, settings.pack_weights) if settings.store else None
    if settings.json:
        report = {
            **_as_values(points, clock),
            "cost": cost.to_dict(),
            "setting": describe_setting(loaded.model, LookaheadConfig(pack_weights=settings.pack_weights)),
            "model": loaded.origin or str(loaded.path),
            "stored": None if stored is None else str(stored),
            "versions": process.versions(),
        }
        print_json(consoles.out, report)
        return process.OK
    consoles.out.print(measurement_table(points, cost, clock))
    consoles.out.print(fit_line(points, cost))
    if stored is not None:
        consoles.notes.print(f"stored in {stored}")
    return process.OK


def curve(points: Sequence[Point]) -> StepCosts:
    """Curve of step times, fitted to measured points."""
    return StepCosts.fit((point.nodes, point.context, point.seconds) for point in points)


def keep_curve(loaded: LoadedModel, points: Sequence[Point], pack_weights: bool) -> Path:
    """Fit and store the curve of measured points, and return its file."""
    setting = describe_setting(loaded.model, LookaheadConfig(pack_weights=pack_weights))
    details = {"measured": _as_values(points, clock_of(loaded.model.device)), "date": date.today().isoformat()}
    return store_costs(setting, curve(points), details)


def _as_values(points: Sequence[Point], clock: str) -> dict[str, Any]:
    return {"points": [asdict(point) for point in points], "clock": clock}


def fitting_contexts(requested: Sequence[int] | None, loaded: LoadedModel, notes: Console) -> list[int]:
    """Text lengths to measure at. Defaults longer than the model's context are left out.

    Raises:
        InvalidArgumentError: A requested length exceeds the model's context.
    """
    limit = loaded.context_length
    contexts = sorted(set(requested or CONTEXTS))
    fitting = [context for context in contexts if limit is None or context <= limit]
    if requested and fitting != contexts:
        raise InvalidArgumentError(f"--context {contexts[-1]} is out of range; the context of this model is {limit}")
    if fitting != contexts:
        notes.print(f"note: the context of this model is {limit}, so longer texts are left out")
    return fitting or [max(1, (limit or 1) // 2)]


def measured_steps(
    loaded: LoadedModel, nodes: Sequence[int], contexts: Sequence[int], repeats: int, pack_weights: bool, notes: Console
) -> list[Point]:
    """Time steps of each size in `nodes` after texts of each length in `contexts`, with a progress bar."""
    advice = "a shorter --context, fewer --nodes or --dtype bfloat16"
    with measuring_progress(notes) as bar, memory_errors_explained(f"on {loaded.model.device} while measuring", advice):
        task = bar.add_task("warming up", total=timings(nodes, contexts, repeats))

        def progress(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        return measure(loaded.model, nodes, contexts, repeats, progress, pack_weights)


def measurement_table(points: Sequence[Point], cost: StepCosts, clock: str) -> Table:
    """Table with a row for each size and length: time, ratio to a one-token step, fitted time."""
    table = Table(title=f"{'CPU' if clock == 'cpu' else 'wall'} time of a step")
    for title in ("context", "nodes", "ms", "over one token", "fit, ms"):
        table.add_column(title, justify="right")
    for context in sorted({point.context for point in points}):
        of_context = [point for point in points if point.context == context]
        single = next(point for point in of_context if point.nodes == 1)
        for point in of_context:
            table.add_row(
                f"{context:,}",
                f"{point.nodes:,}",
                f"{1000 * point.seconds:.2f}",
                f"{point.seconds / single.seconds:.2f}x",
                f"{1000 * cost.expected(point.nodes, context):.2f}",
            )
        table.add_section()
    return table


def fit_line(points: Sequence[Point], cost: StepCosts) -> str:
    """Line with the median and maximum relative error of the curve."""
    errors = [abs(float(cost.expected(point.nodes, point.context)) / point.seconds - 1) for point in points]
    return f"fit: off by {median(errors):.1%} in the median, {max(errors):.1%} at most"
