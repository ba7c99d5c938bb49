"""CPU time of the host in a step, in microseconds by part. The model's pass is a stub.

    python benchmarks host --base COMMIT --output benchmarks/results/host.jsonl

The texts are recorded. A virtual clock has the prices of an H200, so `auto` drafts as it would there.
Rows of an Engine lie in pages as on a GPU; tokens are sampled as on a CPU. Two commits take turns.

- **steps**: steps of an Engine. `us` is the median, `low_us` the lower quartile, `before_us` the part before the pass.
  `parts_us`, from other steps: `plan` (scheduler, check of the model, pace), `draft`, `stage` (inputs), `launched`
  (results, second check of the model), `verify`, `commit`, `watch`, `learn`, `notify` (handles, pace). `submit_us` is
  the time of a call of `submit`.
- **generate**: the same for one text, from pass to pass, on the path of a CPU and with fixed shapes ("static").
- **path**: calls, functions and files of the library in a step of the demo model. `_around` counts from step to step.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from host_worker import CALLS, WAYS
from lookahead.bench.rows import Row
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, option
from worth import ROOT, Source, Worker

PARTS = ("steps", "generate", "path")

PATHS = {0: "generate", 1: "Engine", 8: "Engine"}
"""Names by number of rows; 0 rows mean `generate`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command."""

    parts: tuple[str, ...] = option(PARTS, f"of {', '.join(PARTS)}")
    base: str = option("", "commit to compare with")
    rows: tuple[int, ...] = option((1, 4, 16, 64, 256), "rows of the Engine")
    ways: tuple[str, ...] = option(tuple(WAYS), "drafting and sampling of the Engine")
    texts: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    prompt: int = option(256, "tokens of a prompt")
    new_tokens: int = option(192, "tokens of an answer")
    turns: int = option(4, "repetitions of each measurement")


class Sides:
    """The compared commits, with a measuring process for each.

    Args:
        options: Options of the command.

    Attributes:
        commits: Abbreviated hashes by side, `base` and `here`.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.commits = {**({"base": _commit(options.base)} if options.base else {}), "here": _here()}
        self._sources: dict[str, Source] = {}
        self._workers: dict[str, Worker] = {}

    def of_steps(self, way: str, rows: int) -> Iterator[Row]:
        """Yield a row for each turn and commit; 0 rows mean `generate`."""
        workers = {side: self._worker(side) for side in self.commits}
        for worker in workers.values():
            worker.ask(open=way, rows=rows)
        kind = "step" if rows else "generate"
        for turn in range(self._options.turns):
            for side in list(workers)[:: -1 if turn % 2 else 1]:
                figures = workers[side].ask(turn=turn)
                row = {
                    "kind": kind,
                    "commit": side,
                    "way": way,
                    "rows": rows or 1,
                    "order": rows,
                    "turn": turn,
                    **figures,
                }
                yield row | ({} if row["equal"] else {"error": f"{side}, {way}, {rows} rows: another text"})

    def of_path(self, rows: int) -> Iterator[Row]:
        """Yield the calls of a step for each commit, from processes without the stub."""
        for side in self.commits:
            worker = self._start(side)
            yield {"kind": "path", "commit": side, "way": PATHS[rows], "rows": rows or 1, **worker.ask(path=rows)}
            worker.close()

    def _worker(self, side: str) -> Worker:
        if side not in self._workers:
            self._workers[side] = self._start(side)
        return self._workers[side]

    def _start(self, side: str) -> Worker:
        options = self._options
        if side not in self._sources:
            self._sources[side] = Source(options.base if side == "base" else None)
        return Worker(
            self._sources[side],
            [
                *("host_worker.py", "--texts", str(Path(options.texts).resolve())),
                *("--prompt", str(options.prompt), "--new-tokens", str(options.new_tokens)),
            ],
        )


def _commit(name: str) -> str:
    """Return the abbreviated hash of a commit.

    Raises:
        InvalidArgumentError: There is no such commit.
    """
    result = subprocess.run(
        ["git", "rev-parse", "--short=12", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise InvalidArgumentError(f"--base {name!r}: no such commit ({result.stderr.strip()})")
    return result.stdout.strip()


def _here() -> str:
    """Return the commit of this checkout, with a plus sign after changes of the library."""
    changed = subprocess.run(["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, check=True).stdout
    return _commit("HEAD") + ("+" if changed.strip() else "")


def probe(options: Options) -> Probe:
    """Return the measurements that the options name.

    Raises:
        InvalidArgumentError: An option has an unknown value.
    """
    for name, names, known in (("parts", options.parts, PARTS), ("ways", options.ways, WAYS)):
        if unknown := [one for one in names if one not in known]:
            raise InvalidArgumentError(f"--{name} {unknown[0]!r}: choose from {', '.join(map(repr, known))}")
    sides = Sides(options)
    measurements: dict[str, list[tuple[str, Callable[[], Iterator[Row]]]]] = {
        "steps": [
            (f"{way}, {rows} rows", partial(sides.of_steps, way, rows)) for rows in options.rows for way in options.ways
        ],
        "generate": [(f"generate, {way}", partial(sides.of_steps, way, 0)) for way in CALLS],
        "path": [(f"path, {name}, {rows} rows", partial(sides.of_path, rows)) for rows, name in PATHS.items()],
    }
    units = [Unit(name, measure) for part in options.parts for name, measure in measurements[part]]
    settings: dict[str, Any] = {"prompt": options.prompt, "new_tokens": options.new_tokens}
    return Probe(units, {"commits": sides.commits, "prices": "H200, 8B", **settings})
