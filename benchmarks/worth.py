"""Compare this checkout with another commit, in pairs: tokens per step and CPU time.

    python benchmarks worth --base COMMIT [--quick] [--turns N] [--only TEXT]

Two processes, one of each commit, alternate case by case. Each turn starts new processes in the other order. Rows are
written to `build/worth`, where one command runs at a time; the same command resumes an interrupted run. The report has
for each line the median ratio of S and of speed (CPU time of the base over this checkout's), with a 95 % bootstrap
interval over cases. A line passes if the lower end of its interval is above -1 % in S and above -2 % in speed. It fails
if the upper end is below; else it is undecided. `--quick` compares S only, at fixed numbers of nodes.

The exit status is 0 if all lines pass, 1 if one fails, 3 if some are undecided, 2 for an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console

from lookahead.bench.rows import Row, RowsFile, kept_lines
from lookahead.errors import InvalidArgumentError, LookaheadError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/worth"
LIMITS = {"S": -0.01, "speed": -0.02}
SAMPLES = 4000
PASSES, FAILS, UNDECIDED = "passes", "FAILS", "undecided"


@dataclass(frozen=True)
class Estimate:
    """Relative change of a line (0 for none), with the ends of its interval."""

    median: float
    low: float
    high: float

    def verdict(self, limit: float) -> str:
        """Verdict: passes if the interval is above the limit, fails if it is below, else undecided."""
        return PASSES if self.low > limit else FAILS if self.high <= limit else UNDECIDED


def estimate(ratios: Mapping[str, Sequence[float]]) -> Estimate:
    """Estimate the change: median over cases of the geometric mean ratio, with a bootstrap interval over cases."""
    cases = np.array([np.exp(np.mean(np.log(values))) for values in ratios.values()]) - 1
    drawn = np.random.default_rng(0).integers(len(cases), size=(SAMPLES, len(cases)))
    low, high = np.quantile(np.median(cases[drawn], axis=1), (0.025, 0.975))
    return Estimate(float(np.median(cases)), float(low), float(high))


class Source:
    """Copy of the library at a commit, or of the working tree, in its own folder.

    Attributes:
        name: Hash of the content.
        folder: Folder that contains `src`.
    """

    def __init__(self, commit: str | None) -> None:
        archive = None
        if commit is not None:
            archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        waiting = FOLDER / "sources/new"
        shutil.rmtree(waiting, ignore_errors=True)
        waiting.mkdir(parents=True)
        if archive is None:
            shutil.copytree(ROOT / "src", waiting / "src")
        else:
            subprocess.run(["tar", "-x", "-C", str(waiting)], input=archive.stdout, check=True)
        files = sorted(path for path in (waiting / "src").rglob("*.py"))
        self.name = _digest(path.relative_to(waiting).as_posix().encode() + path.read_bytes() for path in files)
        self.folder = waiting.parent / self.name
        if self.folder.exists():  # keep it, as it has compiled loops
            shutil.rmtree(waiting)
        else:
            waiting.rename(self.folder)


def _digest(parts: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:12]


class Worker:
    """Process that measures with the library of one source.

    Args:
        source: Source of the library.
        program: Name of a file in this folder, and arguments. The program answers each line of JSON with one line.

    Attributes:
        ready: First line of the program, before any request.
    """

    def __init__(self, source: Source, program: Sequence[str]) -> None:
        src, (name, *arguments) = source.folder / "src", program
        command = [sys.executable, str(ROOT / "benchmarks" / name), "--src", str(src), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = (FOLDER / f"{source.name}.log").open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self.ready: Any = self._answer()

    def ask(self, **request: Any) -> Any:
        """Send a request, and return the answer."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._log.close()

    def _answer(self) -> Any:
        answer = self._process.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise LookaheadError(f"a measuring process ended; see {self._log.name}")
        return json.loads(answer)


class Comparison:
    """Comparison of two sources, with their rows. Files of quick comparisons belong to one source and are reused.

    Args:
        base: Source to compare with.
        here: Source of this checkout.
        shared: Folder of data and models.
        quick: Whether to compare S only.
    """

    def __init__(self, base: Source, here: Source, shared: Path, quick: bool) -> None:
        self._sources, self._shared, self._quick = (base, here), shared, quick
        tools = [
            ROOT / name
            for name in ("benchmarks/lines.py", "benchmarks/cases.py", "benchmarks/models.py", "tools/playback.py")
        ]
        how = _digest(path.read_bytes() for path in tools)
        if quick:
            names = [f"quick-{how}-{source.name}.jsonl" for source in self._sources]
        else:
            names = [f"full-{how}-{base.name}-{here.name}-{side}.jsonl" for side in ("base", "here")]
        rows_of_files = [kept_lines(FOLDER / name, lambda row: {"line", "turn"} <= row.keys()) for name in names]
        self._files = [RowsFile(FOLDER / name, rows, unit_of) for name, rows in zip(names, rows_of_files, strict=True)]

    def names(self) -> list[str]:
        """Names of the lines of the base, which are compared."""
        worker = self._worker(0)
        worker.close()
        return list(worker.ready)

    def _worker(self, side: int) -> Worker:
        program = ["lines.py", "--shared", str(self._shared), *(["--quick"] if self._quick else [])]
        return Worker(self._sources[side], program)

    def turn(self, turn: int, names: Sequence[str]) -> None:
        """Measure the lines of a turn that are not in the files."""
        missing = {name: [side for side in (0, 1) if (name, turn) not in self._files[side]] for name in names}
        if not self._quick:  # times are comparable only if measured together
            missing = {name: [0, 1] for name, sides in missing.items() if sides}
        with ExitStack() as stack:
            workers = {
                side: stack.enter_context(closing(self._worker(side)))
                for side in {side for sides in missing.values() for side in sides}
            }
            for name, sides in missing.items():
                if sides:
                    print(f"turn {turn + 1}: {name}", file=sys.stderr, flush=True)
                    self._measure(name, turn, workers, sides)

    def _measure(self, name: str, turn: int, workers: Mapping[int, Worker], sides: Sequence[int]) -> None:
        cases = {side: workers[side].ask(begin=name, turn=turn) for side in sides}[sides[0]]
        rows: dict[int, list[Row]] = {side: [] for side in sides}
        for number, case in enumerate(cases):
            for side in sides if (number + turn) % 2 else sides[::-1]:
                counts = workers[side].ask(line=name, turn=turn, case=number)
                rows[side].append({"case": case, **counts})
        for side in sides:
            self._files[side].append({"line": name, "turn": turn, "rows": rows[side]})

    def rows(self, line: str, turn: int) -> list[list[Row]]:
        """Rows of a turn: of the base, and of this checkout."""
        units = [[unit for unit in file.rows if unit_of(unit) == (line, turn)][-1] for file in self._files]
        return [unit["rows"] for unit in units]

    def ratios(self, line: str, turns: int, what: str) -> dict[str, list[float]]:
        """Ratios of the base's steps or seconds to this checkout's, by case."""
        by, ratios = "steps" if what == "S" else "seconds", dict[str, list[float]]()
        for turn in range(turns):
            for number, (base, here) in enumerate(zip(*self.rows(line, turn), strict=True)):
                assert base["case"] == here["case"]
                assert base["tokens"] == here["tokens"], f"{line}, {base['case']}: texts of other lengths"
                key = f"{number}: {base['case']}"  # a file may have the same name twice
                ratios.setdefault(key, []).append(base[by] / here[by])
        return ratios


def unit_of(row: Row) -> tuple[str, int]:
    """Line and turn of a row in a file."""
    return row["line"], row["turn"]


def report(comparison: Comparison, names: Sequence[str], turns: int, measures: Sequence[str]) -> int:
    """Print estimate and verdict for each measure and line, and return the exit status."""
    verdicts: Counter[str] = Counter()
    for what in measures:
        limit, together = LIMITS[what], dict[str, list[float]]()
        print(f"\n{what}, here over base, in %: median, interval (must be above {limit:+.0%})")
        for name in names:
            ratios = comparison.ratios(name, turns, what)
            together |= {f"{name}, {case}": values for case, values in ratios.items()}
            verdicts[_show(name, ratios, limit)] += 1
        _show("all cases together", together, limit)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if verdicts[UNDECIDED]:
        print(f"undecided: --turns {4 * turns} halves the intervals, where there are more cases or times are compared")
    return 1 if verdicts[FAILS] else 3 if verdicts[UNDECIDED] else 0


def _show(name: str, ratios: Mapping[str, Sequence[float]], limit: float) -> str:
    """Print the estimate from the ratios of cases, and return the verdict."""
    estimated = estimate(ratios)
    low, middle, high = (100 * value for value in (estimated.low, estimated.median, estimated.high))
    verdict = estimated.verdict(limit)
    print(f"  {name:42} {len(ratios):4} cases {middle:+6.2f} [{low:+6.2f}, {high:+6.2f}] {verdict}")
    return verdict


def compare_commits(arguments: Sequence[str], notes: Console) -> int:
    """Compare this checkout with another commit, in pairs.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python benchmarks worth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="COMMIT", help="commit to compare this checkout with")
    parser.add_argument("--quick", action="store_true", help="compare S only, at fixed numbers of nodes")
    parser.add_argument("--turns", type=int, help="total number of turns (1 if quick, else 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare only lines with this text in their names")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data and models")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(FOLDER / "lock", timeout=0):  # rows and times of two runs at once would mix
            return _compare(options)
    except Timeout as error:
        raise InvalidArgumentError(f"another comparison is running in {FOLDER}; wait until it has ended") from error


def _compare(options: argparse.Namespace) -> int:
    turns = options.turns or (1 if options.quick else 3)
    if not (options.shared / "data").is_dir():
        raise InvalidArgumentError(f"--shared {options.shared}: no folder with data and models")
    try:
        base, here = Source(options.base), Source(None)
    except subprocess.CalledProcessError as error:
        raise InvalidArgumentError(f"--base {options.base}: no such commit ({error})") from error
    comparison = Comparison(base, here, options.shared.resolve(), options.quick)
    names = [name for name in comparison.names() if options.only in name]
    if not names:
        raise InvalidArgumentError(f"--only {options.only!r}: no line has this text in its name")
    for turn in range(turns):
        comparison.turn(turn, names)
    return report(comparison, names, turns, ["S"] if options.quick else list(LIMITS))
