"""Change one place of the code at a time, and count the changes that tests notice: mutation testing.

    python tools/mutants.py --output build/out/mutants.jsonl               # as `make mutants`
    python tools/mutants.py --output FILE --count 20 --only core/walk.py   # some changes of one file
    python tools/mutants.py --output FILE --table                          # the table of what FILE has

cosmic-ray defines the possible changes. A seeded sample of places is drawn from the files that decide tokens, with one
change at each. The tests of the file run up to the first failure. Changes that they miss are then tried with the tests
of `BROAD` (not with `--first`). A change that all tests miss is a survivor: it has no effect, or a test is missing.

Rows are appended to FILE, and a change that has a row there is not tried again: stop and continue at any time. Tests
run in copies of a process that has imported torch and transformers, on a copy of this checkout below build/mutants.
Changed loops run as plain Python, since compiling them would take longer than the tests.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
COPIED = ("src", "tests", "tools", "benchmarks", "examples", "hub", "docs", "pyproject.toml", "README.md", "Makefile")

_BACKEND = "backends/transformers"
_ROWS = ("backends/test_engine.py", "backends/test_packed_rows.py", "backends/test_engine_model.py")
_CACHES = ("backends/test_tree_cache.py", "backends/test_sliding_layers.py", *_ROWS)
_STATIC = ("backends/test_static_engine.py", "backends/test_simulated_cuda.py")
_SAMPLING = ("backends/test_noise.py", "api/test_sampling_exactness.py", "api/test_processors.py")
_STATEFUL = ("api/test_encoder_decoders.py", "api/test_running_states.py")
_SERVING = ("serving/test_serving_engine.py", "backends/test_engine_model.py")
TARGETS = {
    "core/walk.py": ("core/test_walk.py", "core/test_step.py"),
    "core/forest.py": ("core/test_token_tree.py", "core/test_walk.py", "backends/test_packed_rows.py"),
    "core/token_tree.py": ("core/test_token_tree.py", "core/test_walk.py", "core/test_step.py"),
    "core/tree_masks.py": ("core/test_token_tree.py", *_ROWS[:2], "backends/test_tree_attention.py"),
    "core/sequence.py": ("core/test_walk.py", "core/test_step.py", "drafting/test_drafting_fails.py"),
    f"{_BACKEND}/layouts.py": _ROWS,
    f"{_BACKEND}/masks.py": _CACHES,
    f"{_BACKEND}/tree_cache.py": (*_CACHES, "backends/test_indexed_attention.py"),
    f"{_BACKEND}/rows.py": (*_ROWS, *_STATIC),
    f"{_BACKEND}/pooled_rows.py": ("backends/test_engine_model.py", *_STATIC),
    f"{_BACKEND}/noise.py": ("backends/test_noise.py", "api/test_sampling_exactness.py"),
    f"{_BACKEND}/sampler.py": _SAMPLING,
    f"{_BACKEND}/early_sampling.py": _SAMPLING,
    f"{_BACKEND}/chain_cache.py": ("backends/test_chains.py", "backends/test_model_check.py", *_STATEFUL),
    f"{_BACKEND}/snapshots.py": ("backends/test_model_check.py", "api/test_changed_models.py"),
    "serving/selecting.py": ("api/test_processors.py", "api/test_compatibility.py", *_SERVING),
    "serving/scheduler.py": _SERVING,
    "serving/kv_memory.py": _SERVING,
}
"""Tests that are run first, below tests/, for each file below src/lookahead."""
BROAD = (
    *("core/test_walk.py", "core/test_step.py", "core/test_token_tree.py", "api/test_exactness.py"),
    *("api/test_sampling_exactness.py", "api/test_batches.py", "api/test_processors.py", "api/test_running_states.py"),
    *("serving", "api/test_changed_models.py", "api/test_compatibility.py", "api/test_encoder_decoders.py"),
    *("api/test_images.py", "api/test_fuzz.py", "api/test_entry_points.py", "api/test_conformance.py"),
    *("backends", "drafting/test_drafting_fails.py", "drafting/test_draft_batch.py", "parallel"),
)
KILLED, HUNG, SURVIVED = "killed", "hung", "survived"


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: The file, below src/lookahead.
        line: The line of the change.
        operator: Name of cosmic-ray's operator.
        occurrence: Number of the change among all that this operator can make in the file.
        source: Hash of the file.
    """

    file: str
    line: int
    operator: str
    occurrence: int
    source: str


def places(file: str) -> list[list[Mutant]]:
    """Return the changes at each place of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    text = original(file)
    source = hashlib.sha256(text.encode()).hexdigest()[:12]
    provider, found = OperatorProvider(), dict[Any, list[Mutant]]()
    nodes = list(ast_nodes(get_ast(text)))
    for name in provider:
        if provider[name].arguments():
            continue  # operators that need names of variables
        operator = provider[name]()
        spots = (spot for node in nodes for spot in operator.mutation_positions(node))
        for occurrence, (begin, end) in enumerate(spots):
            found.setdefault((begin, end), []).append(Mutant(file, begin[0], name, occurrence, source))
    return list(found.values())


def mutated(mutant: Mutant) -> str | None:
    """Return the text of the file with the change; `None` if only annotations differ, or it is no Python any more."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    text = original(mutant.file)
    changed = mutate_code(text, OperatorProvider()[mutant.operator](), mutant.occurrence)
    try:
        return changed if changed and _behaviour(changed) != _behaviour_before(mutant.file) else None
    except SyntaxError:
        return None


@cache
def original(file: str) -> str:
    """Return the text of a file."""
    return (ROOT / "src" / "lookahead" / file).read_text(encoding="utf-8")


@cache
def _behaviour_before(file: str) -> str:
    return _behaviour(original(file))


def _behaviour(text: str) -> str:
    """Return the syntax tree without annotations, which nothing evaluates, and without what only type checkers read."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) != "overload"]
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.test = ast.Constant(None)
    return ast.dump(tree)


def sample(files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return changes at `count` places of the files, in random order."""
    chance = random.Random(seed)
    spots = [spot for file in files for spot in places(file)]
    chance.shuffle(spots)
    found = []
    for spot in spots:
        if len(found) == count:
            break
        choices = chance.sample(spot, len(spot))
        found += [mutant for mutant in choices if mutated(mutant) is not None][:1]
    return found


class Checkout:
    """A copy of this checkout, to change files and run tests.

    Args:
        number: Number of the copy.
        stamp: The stamp of the compiled loops of the checkout without a change.
    """

    def __init__(self, number: int, stamp: str) -> None:
        self._stamp = stamp
        self._folder = FOLDER / f"checkout-{number}"
        self._log = FOLDER / f"log-{number}.txt"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self._folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self._folder / name)

    def test(self, file: str, text: str, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """Run tests with another text of a file.

        Args:
            file: The file, below src/lookahead.
            text: Its text.
            tests: Files or folders below tests/.
            seconds: Limit of processor time; longer runs count as hung.

        Returns:
            The result, and the test that failed.
        """
        path = self._folder / "src" / "lookahead" / file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            child = os.fork()
            if child == 0:
                self._run(tests, int(seconds), "@compiled" in text)
            status = self._wait(child, seconds)
        finally:
            path.write_text(before, encoding="utf-8")
        log = self._log.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
        if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return HUNG, ""
        return (SURVIVED, "") if status == 0 else (KILLED, failed[1] if failed else "")

    def _run(self, tests: Sequence[str], seconds: int, loops: bool) -> None:
        """Run pytest in this process, and end it; `loops`: whether the changed file has compiled loops."""
        import pytest

        code = 1
        try:
            os.setpgrp()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # a loop without end may fill the memory
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._folder)
            sys.path.insert(0, str(self._folder / "src"))
            os.environ["PYTHONPATH"] = str(self._folder / "src")
            if loops:
                os.environ["NUMBA_DISABLE_JIT"] = "1"
            else:
                from lookahead.core import compiled

                compiled._stamp = lambda: self._stamp  # use the loops of the unchanged checkout
            paths = [f"tests/{test}" for test in tests]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *paths]))
            sys.stdout.flush()
        finally:
            os._exit(code)

    def _wait(self, child: int, seconds: float) -> int | None:
        """Return the status of the process; `None` if it had to be ended after ten times its processor time."""
        end = time.monotonic() + 10 * seconds
        status = None
        while status is None and time.monotonic() < end:
            done, found = os.waitpid(child, os.WNOHANG)
            status = found if done else None
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # ends processes of its tests too
        if status is None:
            os.waitpid(child, 0)
        return status


def try_mutant(mutant: Mutant, checkout: Checkout, broad: bool) -> dict[str, Any]:
    """Run the tests of a changed file, with `broad` also those of `BROAD`, up to the first failure; return a row."""
    begin, text = time.monotonic(), mutated(mutant)
    assert text is not None
    result, test = checkout.test(mutant.file, text, TARGETS[mutant.file], 240)
    if broad and result == SURVIVED:
        result, test = checkout.test(mutant.file, text, BROAD, 900)
    lines = difflib.unified_diff(original(mutant.file).splitlines(), text.splitlines(), n=0, lineterm="")
    diff = [line for line in lines if line[:3] not in ("---", "+++", "@@ ")]
    seconds = round(time.monotonic() - begin, 1)
    return asdict(mutant) | {"result": result, "broad": broad, "by": test, "diff": diff, "seconds": seconds}


def import_libraries(tests: Sequence[str]) -> None:
    """Import the modules that tests need, those of this checkout left out: it takes longer than many tests."""
    code = "import pytest, sys; pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]); "
    code += "print(*[name for name, one in sys.modules.items() if getattr(one, '__file__', None) and "
    code += "'{root}' not in one.__file__ and '__' not in name], file=sys.stderr)"
    call = [sys.executable, "-c", code.format(root=ROOT), *(f"tests/{test}" for test in tests)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(call, env=environment, capture_output=True, text=True, cwd=ROOT)
    for name in found.stderr.splitlines()[-1].split():
        with suppress(ImportError):
            importlib.import_module(name)


def compiled_stamp() -> str:
    """Compile the loops of this checkout, and return their stamp."""
    code = "from lookahead.core.compiled import _stamp; from lookahead.drafting import compile_loops; "
    code += "compile_loops(); print(_stamp())"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, the latest of each change."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return list({_key(row): row for row in map(json.loads, lines)}.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["file"], row["operator"], row["occurrence"], row["source"]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of results, and the survivors."""
    yield "| file | changes | noticed | survivors |"
    yield "| --- | ---: | ---: | ---: |"
    for file in [*TARGETS, ""]:
        counts = Counter(row["result"] for row in rows if file in ("", row["file"]))
        total, left = counts.total(), counts[SURVIVED]
        if total:
            name = f"`{file}`" if file else "all"
            yield f"| {name} | {total} | {total - left} ({100 * (total - left) / total:.0f} %) | {left} |"
    for row in rows:
        if row["result"] == SURVIVED:
            yield "\n".join(["", f"{row['file']}:{row['line']}", *row["diff"]])


def main() -> None:
    """Try a sample of changes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file that rows are appended to")
    parser.add_argument("--count", type=int, default=300, help="number of changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(TARGETS), default=list(TARGETS), metavar="FILE")
    parser.add_argument("--first", action="store_true", help="run the first tests of each file alone")
    parser.add_argument("--number", type=int, default=0, help="with --of: the part of the changes that is tried")
    parser.add_argument("--of", type=int, default=1, help="number of parts, for several processes at once")
    parser.add_argument("--table", action="store_true", help="print the table of the rows there are")
    options = parser.parse_args()
    if not options.table:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork
        import_libraries(sorted({test for tests in TARGETS.values() for test in tests}))
        checkout = Checkout(options.number, compiled_stamp())
        mutants = sample(options.only, options.count, options.seed)[options.number :: options.of]
        rows = {_key(row): row for row in rows_of(options.output)}
        for mutant in mutants:
            row = rows.get(_key(asdict(mutant)))
            if row is None or (row["result"] == SURVIVED and not row["broad"] and not options.first):
                row = try_mutant(mutant, checkout, broad=not options.first)
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['result']:9} {row['file']}:{row['line']} {row['operator']} {row['by']}", flush=True)
    print("\n".join(table(rows_of(options.output))))


if __name__ == "__main__":
    main()
