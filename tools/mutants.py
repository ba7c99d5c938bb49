"""Change one place of the code at a time, and count the changes that tests notice: mutation testing.

    python tools/mutants.py --output build/out/mutants.jsonl               # as `make mutants`
    python tools/mutants.py --output FILE --count 20 --only core/walk.py   # some changes of one file
    python tools/mutants.py --output FILE --table                          # the table of what FILE has

cosmic-ray defines the possible changes. A seeded sample of places is drawn from the files that decide tokens, with one
change at each. Each file of tests first runs without a change; coverage records the lines that each test runs, and its
seconds. A change is tried with the tests that run its line, up to the first failure. Tests that noticed other changes
of the file come first, then the quickest test of each function. A change that all tests miss is a survivor: it has no
effect, or a test is missing.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from covering import CoveringTests, Recorder

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
COPIED = ("src", "tests", "tools", "benchmarks", "examples", "hub", "docs", "pyproject.toml", "README.md", "Makefile")

_NAMES = {
    "core": ("walk", "forest", "token_tree", "tree_masks", "sequence"),
    "backends/transformers": (
        *("layouts", "masks", "tree_cache", "rows", "pooled_rows", "noise", "sampler", "early_sampling"),
        *("chain_cache", "snapshots"),
    ),
    "serving": ("selecting", "scheduler", "kv_memory"),
}
TARGETS = tuple(f"{folder}/{name}.py" for folder, names in _NAMES.items() for name in names)
"""The files below src/lookahead that decide tokens."""
_CASES = ("backends/apart/simulated_cuda_cases.py", "backends/apart/simulated_engine_cases.py")
TESTS = ("core", "serving", "backends", *_CASES, "api", "drafting/test_known_noise.py", "drafting/test_text_only.py")
"""Folders and files of their tests."""
_OTHERS = "llama|gguf|findings|dict_|_cuda|test_types|wrong|refusals|entry|pace|kept_loops|core/test_files"
"""Expression in names of files that run none of the files above, or in other processes alone."""
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
        stamp: The stamp of the compiled loops of the checkout without a change.
    """

    def __init__(self, stamp: str) -> None:
        self._stamp = stamp
        self._folder = FOLDER / f"checkout-{os.getpid()}"
        self._log = FOLDER / f"log-{os.getpid()}.txt"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self._folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self._folder / name)

    def learn(self, test: str) -> Path:
        """Return the path of the lines that each test of a file of tests runs, from this run or an earlier one."""
        path = FOLDER / f"learned-{self._stamp}" / test.replace("/", "-")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            files = {file: self._folder / "src" / "lookahead" / file for file in TARGETS}
            self._in_child(lambda: self._pytest([f"tests/{test}"], Recorder(files, path)), 1200)
        return path

    def test(self, file: str, text: str, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """Run tests with another text of a file; return the result, and the test that failed.

        Runs of more than `seconds` of processor time count as hung.
        """
        path = self._folder / "src" / "lookahead" / file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            status = self._in_child(lambda: self._pytest(["-x", *tests], file=str(path)), seconds)
        finally:
            path.write_text(before, encoding="utf-8")
        log = self._log.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
        if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return HUNG, ""
        if status and not failed and "ERROR: not found" in log:
            raise SystemExit(log)
        return (SURVIVED, "") if status == 0 else (KILLED, failed[1] if failed else "")

    def _pytest(self, arguments: Sequence[str], *plugins: object, file: str = "") -> int:
        """Run pytest with the code of the copy; loops of the changed file are plain Python, all others compiled."""
        os.chdir(self._folder)
        sys.path.insert(0, str(self._folder / "src"))
        os.environ["PYTHONPATH"] = str(self._folder / "src")
        from lookahead.core import compiled

        compiled._stamp = lambda: self._stamp  # use the loops of the unchanged checkout
        compiles = compiled._compile
        is_plain = lambda function: function.__code__.co_filename == file  # noqa: E731
        compiled._compile = lambda one, *rest, **options: one if is_plain(one) else compiles(one, *rest, **options)
        keeps = compiled.keep_compiled
        compiled.keep_compiled = lambda loop: keeps(loop) if hasattr(loop, "py_func") else None
        return int(pytest.main(["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *arguments], plugins))

    def _in_child(self, call: Callable[[], int], seconds: float) -> int | None:
        """Return the status of a process that makes a call; `None` if it had to be ended. Its output is in the log."""
        child = os.fork()
        if child:
            return self._wait(child, seconds)
        code = 1
        try:
            os.setpgrp()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # a loop without end may fill the memory
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = call()
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


def try_mutant(mutant: Mutant, checkout: Checkout, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests up to the first failure; return a row."""
    begin, text = time.monotonic(), mutated(mutant)
    result, test = checkout.test(mutant.file, text, tests, 300)
    lines = difflib.unified_diff(original(mutant.file).splitlines(), text.splitlines(), n=0, lineterm="")
    diff = [line for line in lines if line[:3] not in ("---", "+++", "@@ ")]
    seconds = round(time.monotonic() - begin, 1)
    return asdict(mutant) | {"result": result, "by": test, "tests": len(tests), "diff": diff, "seconds": seconds}


def import_libraries(tests: Sequence[str]) -> None:
    """Import the modules that tests need, without modules of this checkout: it takes longer than many tests."""
    code = "import pytest, sys; pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]); "
    code += "print(*[name for name, one in sys.modules.items() if getattr(one, '__file__', None) and "
    code += "'{root}' not in one.__file__ and '__' not in name], file=sys.stderr)"
    call = [sys.executable, "-c", code.format(root=ROOT), *(f"tests/{test}" for test in tests)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(call, env=environment, capture_output=True, text=True, cwd=ROOT)
    for name in found.stderr.splitlines()[-1].split():
        with suppress(ImportError):
            importlib.import_module(name)


def files_of(tests: Sequence[str]) -> list[str]:
    """Return files of tests below tests/: named ones, and those in named folders that run the files above."""
    folder = ROOT / "tests"
    paths = [path for test in tests for path in (sorted((folder / test).glob("test_*.py")) or [folder / test])]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if name in tests or not re.search(_OTHERS, name)]


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
    parser.add_argument("--only", nargs="*", choices=TARGETS, default=TARGETS, metavar="FILE")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files or folders of tests, below tests/")
    parser.add_argument("--seconds", type=float, default=100, help="limit of the tests of a change, in processor time")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--table", action="store_true", help="print the table of the rows there are")
    options = parser.parse_args()
    if not options.table:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork
        import_libraries(options.tests)
        checkout = Checkout(compiled_stamp())
        covering = CoveringTests([checkout.learn(test) for test in files_of(options.tests)])
        for mutant in sample(options.only, options.count, options.seed):
            rows = {_key(row): row for row in rows_of(options.output)}
            row = rows.get(_key(asdict(mutant)))
            if row is None or (options.again and row["result"] == SURVIVED):
                noticed = Counter(row["by"] for row in rows.values() if row["file"] == mutant.file)
                text = original(mutant.file)
                tests = covering.of_line(mutant.file, text, mutant.line, options.seconds, noticed)
                if not tests:
                    continue
                row = try_mutant(mutant, checkout, tests)
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['result']:9} {row['file']}:{row['line']} {row['operator']} {row['by']}", flush=True)
    print("\n".join(table(rows_of(options.output))))


if __name__ == "__main__":
    main()
