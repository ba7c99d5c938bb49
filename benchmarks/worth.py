"""Compare this checkout with another commit, in pairs: is it as good in tokens a step, and in CPU time?

    python benchmarks/worth.py --base COMMIT [--quick] [--turns N] [--only TEXT]

Two processes, one of each commit, take turns case by case; each turn has new processes, and another one begins. Rows go
to `build/worth`, turn by turn for each line, and the same command goes on where it stopped. For each line stand the
medians of the ratios of S and of speed (CPU time of the base over that of this checkout), with the bootstrap interval
over cases that holds 95 %. A line passes if the worse end of its intervals is above -1 % in S and above -2 % in speed;
it fails if the better end is below; else it is undecided. `--quick` compares S alone, at fixed numbers of nodes.

The exit status is 0 if all lines pass, 1 if one fails, 3 if some are undecided, 2 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/worth"
LIMITS = {"S": -0.01, "speed": -0.02}
SAMPLES = 4000
PASSES, FAILS, UNDECIDED = "passes", "FAILS", "undecided"
MOST_TURNS = 99

Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """The change of a line, 0 for none, with the ends of its interval."""

    median: float
    low: float
    high: float

    def verdict(self, limit: float) -> str:
        """Whether it is certainly above a limit, or below."""
        return PASSES if self.low > limit else FAILS if self.high <= limit else UNDECIDED

    def more_turns(self, turns: int, limit: float) -> int:
        """How many turns beside those there are would settle it, if it stays where it is."""
        distance = self.median - limit
        width = self.median - self.low if distance > 0 else self.high - self.median
        needed = turns * (width / distance) ** 2 if distance else math.inf
        return min(max(math.ceil(min(needed, MOST_TURNS)) - turns, 1), MOST_TURNS)


def estimate(ratios: Mapping[str, Sequence[float]]) -> Estimate:
    """The median over cases of their mean change, from the ratios of each; its interval by bootstrap over cases."""
    cases = np.array([np.exp(np.mean(np.log(values))) for values in ratios.values()]) - 1
    drawn = np.random.default_rng(0).integers(len(cases), size=(SAMPLES, len(cases)))
    low, high = np.quantile(np.median(cases[drawn], axis=1), (0.025, 0.975))
    return Estimate(float(np.median(cases)), float(low), float(high))


class Source:
    """The library as it is at a commit, or in the working tree, in a folder of its own.

    Attributes:
        name: What its content is known by.
        folder: Holds `src`.
    """

    def __init__(self, commit: str | None) -> None:
        archive = None
        if commit is not None:
            archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        waiting = FOLDER / f"sources/{os.getpid()}"
        shutil.rmtree(waiting, ignore_errors=True)
        waiting.mkdir(parents=True)
        if archive is None:
            shutil.copytree(ROOT / "src", waiting / "src")
        else:
            subprocess.run(["tar", "-x", "-C", str(waiting)], input=archive.stdout, check=True)
        files = sorted(path for path in (waiting / "src").rglob("*.py"))
        self.name = _digest(path.relative_to(waiting).as_posix().encode() + path.read_bytes() for path in files)
        self.folder = waiting.parent / self.name
        if self.folder.exists():  # with its compiled loops
            shutil.rmtree(waiting)
        else:
            waiting.rename(self.folder)


def _digest(parts: Iterator[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:12]


class Worker:
    """A process of one source that measures cases."""

    def __init__(self, source: Source, shared: Path, quick: bool) -> None:
        src = source.folder / "src"
        command = [sys.executable, str(ROOT / "benchmarks/worth_lines.py"), "--src", str(src), "--shared", str(shared)]
        environment = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = (FOLDER / f"{source.name}.log").open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            [*command, *(["--quick"] if quick else [])], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self.lines: list[str] = self._answer()

    def ask(self, **request: Any) -> Any:
        """Its answer to a request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise ChildProcessError(f"a measuring process ended; see {self._log.name}")
        return json.loads(answer)


class Rows:
    """Rows on the disk, a unit of `(line, turn)` at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # it was cut off
            path.write_text("".join(lines[:-1]), encoding="utf-8")
            del lines[-1]
        units = list(map(json.loads, lines))
        self.units: dict[tuple[str, int], list[Row]] = {(unit["line"], unit["turn"]): unit["rows"] for unit in units}

    def append(self, line: str, turn: int, rows: list[Row]) -> None:
        """Keep a unit."""
        self.units[line, turn] = rows
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"line": line, "turn": turn, "rows": rows}) + "\n")


class Comparison:
    """Two sources, and their rows: of a quick one each source has a file of its own, which other comparisons share.

    Args:
        base, here: The sources.
        shared: Folder of data and models.
        quick: Whether to compare S alone.
    """

    def __init__(self, base: Source, here: Source, shared: Path, quick: bool) -> None:
        self._sources, self._shared, self._quick = (base, here), shared, quick
        tools = (ROOT / "benchmarks/worth_lines.py", ROOT / "tools/playback.py")
        how = _digest(path.read_bytes() for path in tools)
        if quick:
            names = [f"quick-{how}-{source.name}.jsonl" for source in self._sources]
        else:
            names = [f"full-{how}-{base.name}-{here.name}-{side}.jsonl" for side in ("base", "here")]
        self._rows = [Rows(FOLDER / name) for name in names]

    def names(self) -> list[str]:
        """The lines that are compared."""
        worker = Worker(self._sources[1], self._shared, self._quick)
        worker.close()
        return worker.lines

    def turn(self, turn: int, names: Sequence[str]) -> None:
        """Measure what is missing of a turn."""
        missing = {name: [side for side in (0, 1) if (name, turn) not in self._rows[side].units] for name in names}
        if not self._quick:  # times are those of the same minutes
            missing = {name: [0, 1] for name, sides in missing.items() if sides}
        needed = {side for sides in missing.values() for side in sides}
        workers = {side: Worker(self._sources[side], self._shared, self._quick) for side in needed}
        try:
            for name, sides in missing.items():
                if sides:
                    print(f"turn {turn + 1}: {name}", file=sys.stderr, flush=True)
                    self._measure(name, turn, workers, sides)
        finally:
            for worker in workers.values():
                worker.close()

    def _measure(self, name: str, turn: int, workers: Mapping[int, Worker], sides: Sequence[int]) -> None:
        cases = {side: workers[side].ask(begin=name, turn=turn) for side in sides}[sides[0]]
        found: dict[int, list[Row]] = {side: [] for side in sides}
        for number, case in enumerate(cases):
            for side in sides if (number + turn) % 2 else sides[::-1]:
                counts = workers[side].ask(line=name, turn=turn, case=number)
                found[side].append({"case": case, **counts})
        for side in sides:
            self._rows[side].append(name, turn, found[side])

    def ratios(self, line: str, turns: int, what: str) -> dict[str, list[float]]:
        """This checkout over the base, for each case."""
        found: dict[str, list[float]] = {}
        for turn in range(turns):
            pairs = zip(*(rows.units[line, turn] for rows in self._rows), strict=True)
            for number, (base, here) in enumerate(pairs):
                assert base["case"] == here["case"]
                assert base["tokens"] == here["tokens"], f"{line}, {base['case']}: texts of other lengths"
                by = "steps" if what == "S" else "seconds"
                key = f"{number}: {base['case']}"  # a file may have the same name twice
                found.setdefault(key, []).append(base[by] / here[by])
        return found

    def exhausted(self, line: str, turns: int) -> bool:
        """Whether another turn would have nothing new."""
        return not self._rows[0].units[line, turns - 1]


def report(comparison: Comparison, names: Sequence[str], turns: int, measures: Sequence[str]) -> int:
    """Print a line for each line and measure, and what it comes to; returns the exit status."""
    verdicts: list[str] = []
    lacking = 0
    for what in measures:
        limit, whole = LIMITS[what], dict[str, list[float]]()
        print(f"\n{what}, here over base, in %: median, interval (must be above {limit:+.0%})")
        for name in names:
            ratios = comparison.ratios(name, turns, what)
            whole |= {f"{name}, {case}": values for case, values in ratios.items()}
            found = estimate(ratios)
            verdict, more = found.verdict(limit), ""
            if verdict == UNDECIDED:
                turns_lacking = found.more_turns(turns, limit)
                lacking = max(lacking, turns_lacking)
                count = f"{turns_lacking}{'+' if turns_lacking >= MOST_TURNS else ''}"
                more = ": no more cases" if comparison.exhausted(name, turns) else f": {count} more turns"
            verdicts.append(verdict)
            print(_shown(name, found, len(ratios)), f"{verdict}{more}")
        print(_shown("all cases together", estimate(whole), len(whole)), estimate(whole).verdict(limit))
    counts = {verdict: verdicts.count(verdict) for verdict in (PASSES, FAILS, UNDECIDED)}
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    if counts[UNDECIDED] and not counts[FAILS]:
        print(f"undecided: about {lacking} more turns are needed; the same command with --turns {turns + lacking}")
    return 1 if counts[FAILS] else 3 if counts[UNDECIDED] else 0


def _shown(name: str, found: Estimate, cases: int) -> str:
    values = f"{100 * found.median:+6.2f} [{100 * found.low:+6.2f}, {100 * found.high:+6.2f}]"
    return f"  {name:42} {cases:4} cases {values}"


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="what this checkout is compared with")
    parser.add_argument("--quick", action="store_true", help="S alone, at fixed numbers of nodes")
    parser.add_argument("--turns", type=int, help="turns in all (1 if quick, else 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only lines whose names hold it")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data and models")
    options = parser.parse_args()
    turns = options.turns or (1 if options.quick else 3)
    try:
        base, here = Source(options.base), Source(None)
    except subprocess.CalledProcessError as error:
        print(f"--base {options.base}: no such commit ({error})", file=sys.stderr)
        return 2
    if not (options.shared / "data").is_dir():
        print(f"--shared {options.shared}: no folder with data and models", file=sys.stderr)
        return 2
    comparison = Comparison(base, here, options.shared.resolve(), options.quick)
    names = [name for name in comparison.names() if options.only in name]
    if not names:
        print(f"--only {options.only!r}: no line has that in its name", file=sys.stderr)
        return 2
    for turn in range(turns):
        comparison.turn(turn, names)
    return report(comparison, names, turns, ["S"] if options.quick else list(LIMITS))


if __name__ == "__main__":
    sys.exit(main())
