"""CPU time of the host in a step, in microseconds by part. The model's pass is a stub.

    python benchmarks host --base COMMIT --output benchmarks/results/host.jsonl

The texts are recorded. A virtual clock has the prices of an H200, so `auto` drafts as it would there.
Rows of an Engine lie in pages as on a GPU; tokens are sampled as on a CPU. Two commits take turns.

- **steps**: steps of an Engine. `us` is the median, `low_us` the lower quartile, `before_us` the part before the pass.
  `parts_us`, from other steps: `plan` (scheduler, check of the model, pace), `draft`, `stage` (inputs), `launched`
  (results, second check of the model), `verify`, `commit`, `watch`, `learn`, `notify` (handles, pace). `submit_us` is
  the time of a call of `submit`.
- **generate**: the same for one text, from pass to pass, on the path of a CPU and with fixed shapes ("static").
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from host_worker import CALLS, WAYS
from lookahead.bench.rows import Row
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, option
from worth import ROOT, Source, Worker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command."""

    base: str = option("", "commit to compare with")
    rows: list[int] = option([1, 4, 16, 64, 256], "rows of the Engine")
    ways: list[str] = option(list(WAYS), "drafting and sampling of the Engine", choices=WAYS)
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

    def _worker(self, side: str) -> Worker:
        options = self._options
        if side not in self._workers:
            program = [
                *("host_worker.py", "--texts", str(Path(options.texts).resolve())),
                *("--prompt", str(options.prompt), "--new-tokens", str(options.new_tokens)),
            ]
            self._workers[side] = Worker(Source(options.base if side == "base" else None), program)
        return self._workers[side]


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
    """Return the measurements that the options name."""
    sides = Sides(options)
    units = [
        Unit(f"{way}, {rows} rows", partial(sides.of_steps, way, rows)) for rows in options.rows for way in options.ways
    ]
    units += [Unit(f"generate, {way}", partial(sides.of_steps, way, 0)) for way in CALLS]
    settings: dict[str, Any] = {"prompt": options.prompt, "new_tokens": options.new_tokens}
    return Probe(units, {"commits": sides.commits, "prices": "H200, 8B", **settings})
