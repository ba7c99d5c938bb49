"""Tests that run a line, so that a change of the line is tried with them."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import pytest


class Recorder:
    """A plugin of pytest that records the lines that each test runs, and its seconds of processor time.

    Args:
        files: Paths of the recorded files, by name.
        output: The file that is written.
    """

    def __init__(self, files: Mapping[str, Path], output: Path) -> None:
        from coverage import Coverage

        self._files = files
        self._output = output
        self._seconds = dict[str, float]()
        self._coverage = Coverage(data_file=None, include=[*map(str, files.values())], config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test."""
        self._coverage.switch_context(item.nodeid)
        begin = time.process_time()
        result = yield
        self._seconds[item.nodeid] = time.process_time() - begin
        return result

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {name: data.contexts_by_lineno(str(path)) for name, path in self._files.items()}
        self._output.write_text(json.dumps({"seconds": self._seconds, "lines": lines}))


class CoveringTests:
    """Tests by the lines that they run.

    Args:
        paths: Files of a `Recorder`.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._seconds = dict[str, float]()
        self._tests: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in paths:
            content = json.loads(path.read_text())
            self._seconds |= content["seconds"]
            for file, lines in content["lines"].items():
                for line, tests in lines.items():
                    self._tests[file][int(line)].update(filter(None, tests))

    def of_line(self, file: str, text: str, line: int, seconds: float, noticed: Counter[str]) -> list[str]:
        """Return the tests that run a line, sorted by their chance to notice a change of it.

        Tests that noticed other changes come first, then the quickest test of each function.

        Args:
            file: Name of the file.
            text: Its text.
            line: Number of the line.
            seconds: Limit of the tests' processor time.
            noticed: Number of changes that each test noticed.
        """
        tests = sorted(self._running(file, text, line), key=lambda test: (self._seconds[test], test))
        numbers = Counter[str]()
        turns = dict[str, tuple[int, int]]()
        for test in tests:
            function = test.partition("[")[0]
            turns[test] = -noticed[test], numbers[function]
            numbers[function] += 1
        tests.sort(key=turns.__getitem__)
        ends = accumulate(self._seconds[test] for test in tests)
        return [test for test, end in zip(tests, ends, strict=True) if end <= seconds] or tests[:1]

    def _running(self, file: str, text: str, line: int) -> set[str]:
        """Return the tests of the line, or else of its statement, its function or the file.

        Lines of compiled loops have no tests, nor have lines that only an import runs.
        """
        statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        ranges = [(node.lineno, node.end_lineno or node.lineno) for node in statements]
        around = sorted((last - first, first, last) for first, last in ranges if first <= line <= last)
        for _, first, last in [(0, line, line), *around, (0, 0, len(text))]:
            tests = set[str]().union(*(tests for at, tests in self._tests[file].items() if first <= at <= last))
            if tests:
                return tests
        return set()
