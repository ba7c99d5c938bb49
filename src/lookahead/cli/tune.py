"""`lookahead tune` and `lookahead warm-up`: measurements and one-time work that later runs on this machine use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from lookahead.backends.loading import LoadedModel
from lookahead.backends.transformers.findings import describe_setting, store_costs
from lookahead.backends.transformers.snapshots import fingerprint
from lookahead.bench.rows import versions
from lookahead.bench.tuning import CONTEXTS, NODE_COUNTS, Point, clock_of, measure, timings
from lookahead.cli.loading import load_for_decoding, load_model, memory_errors_explained
from lookahead.cli.settings import TuneSettings, WarmUpSettings
from lookahead.cli.signals import INTERRUPTED, OK, raise_on_interrupt
from lookahead.cli.terminal import Consoles, measuring_progress, print_json
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.core.compiled import are_kept, loops_folder
from lookahead.core.files import OWN_FOLDER, user_cache
from lookahead.core.step_costs import StepCosts
from lookahead.errors import InvalidArgumentError

_WARM_UP_REPEATS = 3
"""Timed steps of each size in `warm-up`; fewer than in `tune`, as decoding corrects the curve."""


def run(settings: TuneSettings, consoles: Consoles) -> int:
    """Measure step times, print and store them, and return the exit code."""
    nodes = sorted({1, *(settings.nodes or NODE_COUNTS)})
    if nodes[-1] > MAX_NODES_PER_STEP:
        raise InvalidArgumentError(f"--nodes {nodes[-1]} is out of range; a step has at most {MAX_NODES_PER_STEP}")
    loaded = load_model(settings, consoles.notes)
    raise_on_interrupt()
    contexts = _fitting_contexts(settings.context, loaded, consoles.notes)
    try:
        points = _measured_steps(loaded, nodes, contexts, settings.repeats, settings.pack_weights, consoles.notes)
    except KeyboardInterrupt:
        consoles.notes.print("interrupted; nothing is stored")
        return INTERRUPTED
    cost, clock = _curve(points), clock_of(loaded.model.device)
    file = _store_curve(loaded, points, settings.pack_weights) if settings.store else None
    if settings.json:
        report = {
            "points": [asdict(point) for point in points],
            "clock": clock,
            "cost": cost.to_dict(),
            "setting": describe_setting(loaded.model, LookaheadConfig(pack_weights=settings.pack_weights)),
            "model": loaded.origin or str(loaded.path),
            "stored": None if file is None else str(file),
            "versions": versions(),
        }
        print_json(consoles.out, report)
        return OK
    consoles.out.print(_measurement_table(points, cost, clock))
    errors = [abs(float(cost.expected(point.nodes, point.context)) / point.seconds - 1) for point in points]
    consoles.out.print(f"fit: off by {median(errors):.1%} in the median, {max(errors):.1%} at most")
    if file is not None:
        consoles.notes.print(f"stored in {file}")
    return OK


def warm_up(settings: WarmUpSettings, consoles: Consoles) -> int:
    """Compile, try and measure, print the folders of the results, and return the exit code."""
    own = user_cache() / OWN_FOLDER
    loaded = load_for_decoding(settings, consoles.notes)
    fingerprint(torch.zeros(1))  # compiles the loop that finds changes of packed weights
    if not are_kept():
        raise InvalidArgumentError(f"{own} cannot keep compiled loops; name another folder by XDG_CACHE_HOME")
    paths = {"loops": str(loops_folder()), "trials": str(own / "findings")}
    config = settings.config
    if settings.price and loaded.is_transformers and not config.invariant:  # `tune` cannot measure invariant steps
        contexts = _fitting_contexts(None, loaded, consoles.notes)
        contexts = contexts[: len(CONTEXTS) - 1]  # without the longest, which takes most of the time
        packed, notes = config.pack_weights, consoles.notes
        try:
            points = _measured_steps(loaded, NODE_COUNTS, contexts, _WARM_UP_REPEATS, packed, notes)
        except KeyboardInterrupt:
            notes.print("interrupted; no prices are kept")
            return INTERRUPTED
        paths["costs"] = str(_store_curve(loaded, points, packed))
    if settings.json:
        print_json(consoles.out, {"model": loaded.origin or str(loaded.path), **paths, "versions": versions()})
    else:
        for name, path in paths.items():
            consoles.out.print(f"{name:6}  {path}", soft_wrap=True)
    return OK


def _curve(points: Sequence[Point]) -> StepCosts:
    return StepCosts.fit((point.nodes, point.context, point.seconds) for point in points)


def _store_curve(loaded: LoadedModel, points: Sequence[Point], pack_weights: bool) -> Path:
    setting = describe_setting(loaded.model, LookaheadConfig(pack_weights=pack_weights))
    measured = {"points": [asdict(point) for point in points], "clock": clock_of(loaded.model.device)}
    try:
        return store_costs(setting, _curve(points), {"measured": measured, "date": date.today().isoformat()})
    except OSError as error:
        raise InvalidArgumentError(
            f"{user_cache() / OWN_FOLDER} cannot keep the curve: {error.strerror}; make room, name another folder by "
            "XDG_CACHE_HOME, or give --no-store"
        ) from error


def _fitting_contexts(requested: Sequence[int] | None, loaded: LoadedModel, notes: Console) -> list[int]:
    """Text lengths to measure at. Defaults longer than the model's context are left out; requested ones are errors."""
    limit = loaded.context_length
    contexts = sorted(set(requested or CONTEXTS))
    fitting = [context for context in contexts if limit is None or context <= limit]
    if requested and fitting != contexts:
        raise InvalidArgumentError(f"--context {contexts[-1]} is out of range; the context of this model is {limit}")
    if fitting != contexts:
        notes.print(f"note: the context of this model is {limit}, so longer texts are left out")
    return fitting or [max(1, (limit or 1) // 2)]


def _measured_steps(
    loaded: LoadedModel, nodes: Sequence[int], contexts: Sequence[int], repeats: int, pack_weights: bool, notes: Console
) -> list[Point]:
    advice = "a shorter --context, fewer --nodes or --dtype bfloat16"
    with measuring_progress(notes) as bar, memory_errors_explained(f"on {loaded.model.device} while measuring", advice):
        task = bar.add_task("warming up", total=timings(nodes, contexts, repeats))

        def progress(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        return measure(loaded.model, nodes, contexts, repeats, progress, pack_weights)


def _measurement_table(points: Sequence[Point], cost: StepCosts, clock: str) -> Table:
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
