"""Hold `auto` against the best of its parts, line by line, in CPU time.

Every case of a line is decoded in every way in one process, in an order that changes from case to case: by
transformers, by `auto`, and by what `auto` could have been set to. Which of these is best is chosen on half of the
cases and compared on the other half, both ways round, so that noise does not choose it. Lines and prompts are those
of `worth_lines.py`; the file has a row for each case and, last, one for each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from lookahead import LookaheadConfig, LookaheadError
from lookahead.bench.rows import Row
from probe import Probe, Unit, option
from worth import estimate
from worth_lines import Case, Counts, Models, Runner

NODES = (4, 8, 16, 32)

Config = LookaheadConfig | None

WAYS: dict[str, Config] = {
    "plain": None,
    "auto": LookaheadConfig(),
    **{f"context matches, {size}": LookaheadConfig(preset="context_matches", step_budget=size) for size in (8, 16)},
    **{f"auto, {size}": LookaheadConfig(step_budget=size) for size in NODES},
}
"""What is compared; without a configuration it is transformers' own `generate`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    shared: str = option("../shared", "folder of data and models")
    only: str = option("", "only lines with that in their names")
    cases: int = option(12, "cases of a line")


@dataclass(frozen=True)
class Line:
    """Cases that are decoded in one way after the other.

    Attributes:
        name: Its name.
        cases: They.
        run: Decodes one of them as configured.
    """

    name: str
    cases: Sequence[Case]
    run: Callable[[Config, Case], Counts]


def lines(models: Models, runner: Runner, cases: int) -> Iterator[Line]:
    """All there are."""

    def generate(name: str, found: Sequence[Case], new: int, heat: float = 0.0) -> Callable[[Config, Case], Counts]:
        return lambda config, case: runner.generate(name, config, new, case, found.index(case), sampled=heat)

    for task in ("humaneval", "gsm8k"):
        found = models.task(task)[-cases:]
        for model in ("demo", "demo bfloat16"):
            yield Line(f"{task}, {model}", found, generate(model, found, 128))
        yield Line(f"{task} sampled at 0.8, demo", found, generate("demo", found, 96, 0.8))
    stories = models.stories()[:cases]
    for heat in (0.0, 0.8, 1.0):
        name = f"stories{f' sampled at {heat:g}' if heat else ''}"
        yield Line(name, stories, generate("stories", stories, 200, heat))
    mixed = models.prompts()[:cases]
    yield Line("hard", mixed, generate("hard", mixed, 192, 1.0))
    yield Line("short calls", mixed, generate("hard", mixed, 16, 1.0))
    for file in ("code_edits", "agent_traces"):
        for model in ("forced", "hybrid"):
            found = models.recorded(file)[:cases]
            yield Line(f"forced {file}, {model}", found, generate(model, found, 0))
    for load in (1, 4, 16, 64):
        yield Line(f"Engine, {load} requests", mixed[: max(cases // load, 4)], partial(serve, runner, load))


def serve(runner: Runner, load: int, config: Config, case: Case) -> Counts:
    """As many requests at once; nodes are those of each."""
    if config is None:
        config = LookaheadConfig(step_budget=1)  # no room for drafts
    elif config.preset == "auto" and config.step_budget is not None:
        config = replace(config, step_budget=load * config.step_budget)
    return runner.serve(load, config, 64, case, 0)


def measure(line: Line) -> Iterator[Row]:
    """The rows of a line."""
    ways = dict(WAYS)
    for name, config in WAYS.items():  # what is made once for a model is not measured
        try:
            line.run(config, line.cases[-1])
        except LookaheadError:
            del ways[name]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, case in enumerate(line.cases):
        found: dict[str, Counts] = {}
        first = number % len(ways)
        for name in (*ways, *ways)[first : first + len(ways)]:
            found[name] = line.run(ways[name], case)
        assert len({counts.tokens for counts in found.values()}) == 1, f"{line.name}, {case.id}: texts of other lengths"
        for name, counts in found.items():
            seconds[name].append(counts.seconds)
        yield {
            "kind": "case", "line": line.name, "case": case.id, "tokens": found["auto"].tokens,
            "steps": {name: counts.steps for name, counts in found.items()},
            "seconds": {name: round(counts.seconds, 4) for name, counts in found.items()},
        }  # fmt: skip
    yield {"kind": "line", "line": line.name, "cases": len(line.cases), **held_out(seconds)}


def held_out(seconds: Mapping[str, Sequence[float]]) -> Row:
    """How `auto` compares with the best of the others, chosen on the cases that it is not compared on.

    Args:
        seconds: Of each way those of all cases.
    """

    def speeds(name: str, places: range, over: str = "plain") -> list[float]:
        return [seconds[over][place] / seconds[name][place] for place in places]

    count = len(seconds["auto"])
    halves = range(0, count, 2), range(1, count, 2)
    chosen, ratios, best = [], dict[str, list[float]](), []
    for choose, compare in (halves, halves[::-1]):
        name = max((way for way in seconds if way != "auto"), key=lambda way: median(speeds(way, choose)))
        chosen.append(name)
        best += speeds(name, compare)
        ratios |= {str(place): [seconds[name][place] / seconds["auto"][place]] for place in compare}
    whole = estimate(ratios)
    return {
        "best": " / ".join(dict.fromkeys(chosen)), "best_speed": round(median(best), 4),
        "auto_speed": round(median(speeds("auto", range(count))), 4),
        "over_best": round(1 + whole.median, 4), "low": round(1 + whole.low, 4), "high": round(1 + whole.high, 4),
    }  # fmt: skip


def probe(options: Options) -> Probe:
    """The units: each line."""
    models = Models(Path(options.shared))
    found = [line for line in lines(models, Runner(models), options.cases) if options.only in line.name]
    return Probe([Unit(line.name, partial(measure, line)) for line in found])
