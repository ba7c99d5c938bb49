"""Tables of pages: declared in a file, filled from raw results, kept between marks of the page.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`; what is in it, the file says.
`benchmarks/tables.toml` explains its keys.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from lookahead.bench.rows import Row, read_lines
from lookahead.bench.scaling_law import law_fit
from lookahead.bench.summary import MethodSummary, RunSet, summarise
from lookahead.errors import InvalidArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOTHING = "–"
_PATTERN = "~"
_DECLARED = ("named", "ratio")

COLUMNS: dict[str, tuple[str, str]] = {
    "nodes": ("nodes per step", "{mean_nodes:.1f}"),
    "S": ("S", "{step_compression:.2f}"),
    "range": ("S of a single prompt", "{lowest:.2f} to {highest:.2f}"),
    "before": ("before cycles", "{before_cycles:.2f}"),
    "cpu": ("CPU ms per token", "{cpu_per_token:.2f}"),
    "wall": ("wall ms per token", "{wall_per_token:.2f}"),
    "speed": ("speed over transformers", "{over_reference}"),
    "engine speed": ("over plain engine", "{over_plain}"),
    "cycles": ("in cycles", "{cycle_share:.0%}"),
    "identical": ("identical", "{identical}"),
    "same": ("identical outputs", "{same} of {compared}"),
    "architecture": ("architecture", "{settings.model.architecture}"),
    "parameters": ("parameters", "{settings.model.parameters:,}"),
    "weights": ("weights", "`{settings.model.identity}`"),
    "type": ("type", "{settings.model.dtype}"),
    "data": ("prompts of", "{settings.task.data}"),
    "prompts": ("prompts", "{prompt.distinct}"),
    "passes": ("passes", "{repeat.distinct}"),
    "new tokens": ("new tokens at most", "{settings.task.max_new_tokens}"),
    "temperature": ("temperature", "{settings.task.sampling.temperature}"),
    "top-k": ("top-k", "{settings.task.sampling.top_k}"),
    "top-p": ("top-p", "{settings.task.sampling.top_p}"),
    "class": ("class", "{class}"),
    "runs on": ("runs on", "{runs_on}"),
    "why": ("why", "{reason}"),
    "device": ("device", "{machine.device}"),
    "threads": ("threads", "{machine.threads}"),
    "versions": (
        "versions",
        "lookahead {versions.lookahead}, torch {versions.torch}, transformers {versions.transformers}, "
        "Python {versions.python}",
    ),
}
"""Columns with a name: title and format."""

_MARKED = re.compile(r"(?ms)^<!-- table: (\S+) -->$\n.*?^<!-- end -->$")
_SPEC = ("rows", "where", "by", "lines", "head", "names", "across", "columns", "derived")
_STATISTICS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "median": median,
    "mean": mean,
    "least": min,
    "most": max,
    "sum": sum,
    "count": len,
    "distinct": lambda values: len(set(values)),
}

Table = tuple[list[str], list[list[str]]]
"""Titles, and the cells of each line."""

Where = Mapping[str, Any]
"""Values of fields, by their paths."""


class TableFile:
    """Tables that a file declares."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InvalidArgumentError: It cannot be read, or has an unknown key.
        """
        try:
            self._specs: dict[str, Row] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"cannot read the tables {path}: {error}") from error
        self._path = path
        for name, spec in self._specs.items():
            unknown = set(spec) - set(_SPEC)
            if unknown:
                raise InvalidArgumentError(f"{path}: {name}.{min(unknown)} is no key; known are {', '.join(_SPEC)}")

    def fill(self, page: str) -> str:
        """The page with all of its tables made anew.

        Raises:
            InvalidArgumentError: A table is not known, or cannot be made from its rows.
        """
        return _MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{self.table(found[1])}\n\n<!-- end -->", page)

    def table(self, name: str) -> str:
        """One table in Markdown.

        Raises:
            InvalidArgumentError: It is not known, or cannot be made from its rows.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise InvalidArgumentError(f"{self._path} has no table {name!r}")
        files = [spec["rows"]] if isinstance(spec["rows"], str) else spec["rows"]
        rows = [row for file in files for row in _read(self._path.parent / file)]
        try:
            return "\n".join(markdown(*build(spec, rows)))
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise InvalidArgumentError(f"{self._path}: table {name!r} cannot be made: {error!r}") from error


def build(spec: Row, rows: Sequence[Row]) -> Table:
    """A table as its declaration has it, from these rows."""
    limits = spec.get("where", {})
    chosen = [row for row in rows if _matches(row, limits)]
    if "derived" in spec:
        return DERIVED[spec["derived"]](chosen)
    names = spec.get("names", {})
    of_suite = [row for row in rows if "settings" in row]
    runs = RunSet(of_suite) if of_suite else None
    chosen.sort(key=lambda row: row.get("order", 0))
    lines: list[Row] = spec.get("lines") or [_line(one, spec["by"], names) for one in _found(chosen, spec["by"])]
    columns = list(_columns(spec, chosen, names))
    head: list[str] = spec.get("head") or spec["by"]
    elsewhere = {name for cell in (*columns, *lines) for name in cell.get("over", {})}
    kept = {name: wanted for name, wanted in limits.items() if name not in elsewhere}
    rows = [row for row in rows if _matches(row, kept)]  # a cell is compared with nothing outside of these
    body = [[*line["cells"], *_cells(rows, line, columns, limits, runs)] for line in lines]
    return [*head, *(column["title"] for column in columns)], body


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is of text, the others of figures."""
    head = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    return head + [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


class Figures(string.Formatter):
    """Figures of the rows of one cell, for a format that names them."""

    def __init__(self, column: Row, rows: Sequence[Row], base: Sequence[Row] = (), runs: RunSet | None = None) -> None:
        """Nothing is computed yet.

        Args:
            column: What is declared of the cell.
            rows: Its rows.
            base: The rows that it is compared with.
            runs: All runs, where these are runs of a suite.
        """
        self._column = column
        self._rows = rows
        self._base = base
        self._runs = runs

    def cell(self) -> str:
        """The cell; a dash where a figure is missing."""
        try:
            return self.vformat(self._column["format"], (), {})
        except _MissingError:
            return NOTHING

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """See `string.Formatter`."""
        found = getattr(self, field_name) if field_name in _DECLARED else self.value(field_name)
        if found is None:
            raise _MissingError
        return found, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """See `string.Formatter`; lists have their elements formatted."""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return " ".join(format(one, format_spec) for one in (value if isinstance(value, list) else [value]))

    @property
    def named(self) -> Any:
        """The figure that the column calls its value."""
        found = self.value(self._column["value"])
        return None if found is None else found * self._column.get("scale", 1)

    @property
    def ratio(self) -> float | None:
        """The value over that of the base."""
        own = self.named
        base = Figures(self._column, self._base, runs=self._runs).named if self._base else None
        return None if own is None or not base else own / base

    def value(self, name: str) -> Any:
        """A figure by its name, or one over another; `None` where there is none."""
        if "/" in name:
            upper, lower = map(self.value, name.split("/"))
            return None if upper is None or not lower else upper / lower
        first, *rest = name.split(".")
        if self._runs is not None and hasattr(MethodSummary, first):
            found = getattr(MethodSummary(self._rows, self._runs), first)
            for part in rest if found is not None else ():
                found = found[part] if isinstance(found, Mapping) else getattr(found, part)
            return found
        *path, last = name.split(".")
        if last in _STATISTICS:
            values = self._values(".".join(path))
            return _STATISTICS[last](values) if values else None
        values = self._values(name)
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} has several values, such as {values[0]!r} and {values[-1]!r}")
        return values[0] if values else None

    def _values(self, name: str) -> list[Any]:
        return [value for row in self._rows if (value := field(row, name)) is not None]


class _MissingError(Exception):
    """A figure that was not measured."""


def field(row: Row, name: str) -> Any:
    """What lies in a field, by its path; `None` if there is no such field."""
    found: Any = row
    for part in name.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part) if isinstance(found, dict) else None
    return found


@cache
def _read(path: Path) -> list[Row]:
    return read_lines(path)


def _matches(row: Row, where: Where) -> bool:
    return all(_fits(field(row, name), wanted) for name, wanted in where.items())


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_fits(value, one) for one in wanted)
    if isinstance(wanted, str) and wanted.startswith(_PATTERN):
        return re.search(wanted[1:], str(value)) is not None
    return bool(value == wanted)


def _found(rows: Sequence[Row], fields: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of some fields that rows have, those of the first field together: numbers ascending, or first ones
    first."""
    found = list(dict.fromkeys(tuple(field(row, name) for name in fields) for row in rows))
    first = [list(dict.fromkeys(values)) for values in zip(*found, strict=True)]
    first = [sorted(values) if all(isinstance(value, (int, float)) for value in values) else values for values in first]
    return sorted(found, key=lambda values: [known.index(value) for known, value in zip(first, values, strict=True)])


def _line(values: Sequence[Any], fields: Sequence[str], names: Mapping[str, str]) -> Row:
    cells = [_name(value, names) for value in values]
    return {"cells": cells, "where": dict(zip(fields, values, strict=True))}


def _name(value: Any, names: Mapping[str, str]) -> str:
    return names.get(str(value), f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def _columns(spec: Row, rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[Row]:
    """The columns; those with a brace in their title as often as `across` asks for them."""
    across = spec.get("across", [])
    for column in spec["columns"]:
        if isinstance(column, str):
            column = {"title": COLUMNS[column][0], "format": COLUMNS[column][1]}
        for values in _found(rows, across) if "{" in column["title"] else [()]:
            where = {**dict(zip(across, values, strict=False)), **column.get("where", {})}
            yield {
                **column,
                "where": where,
                "title": column["title"].format(*(_name(value, names) for value in values)),
            }


def _cells(rows: Sequence[Row], line: Row, columns: Sequence[Row], limits: Where, runs: RunSet | None) -> Iterator[str]:
    """The cells of a line; `rows` are all of the table's files, of which `limits` takes those of the table."""
    own_where = line.get("where", {})
    of_line = [row for row in rows if _matches(row, limits) and _matches(row, own_where)]
    for column in columns:
        cell, own, base = {**column, **line}, [row for row in of_line if _matches(row, column["where"])], []
        if "over" in cell:
            over: Where = cell["over"]
            kept = [{key: where[key] for key in where.keys() - over} for where in (limits, own_where, column["where"])]
            base = [row for row in rows if all(_matches(row, where) for where in (over, *kept))]
        yield Figures(cell, own, base, runs).cell() if own else NOTHING


def best_published(rows: Sequence[Row]) -> Table:
    """A line for each `"auto"` with a fixed number of nodes, beside the best of the methods that it is made of.

    That is the one with the highest S among those that ran on the same prompts, never send more nodes in a step, draft
    without a second model and keep nothing from prompt to prompt.
    """
    lines = []
    for runs in summarise(rows):
        for method in runs.methods:
            budget = method.method_settings.get("lookahead", {}).get("step_budget")
            if method.preset == "auto" and budget is not None:
                equal = [other for other in runs.methods if other.most_nodes <= budget]
                rivals = [other for other in equal if other.prompts == method.prompts and _is_published(other)]
                best = max(rivals, key=lambda rival: rival.step_compression, default=None)
                beside = [NOTHING] * 3
                if best is not None and best.step_compression:
                    ratio = method.step_compression / best.step_compression
                    beside = [best.method, f"{best.step_compression:.2f}", f"{ratio:.2f}x"]
                own = [f"{method.cycle_share:.0%}", f"{method.step_compression:.2f}"]
                lines.append([runs.task, method.method, str(budget), *own, *beside])
    return ["task", "method", "nodes at most", "in cycles", "S", "best published method", "its S", "ratio"], lines


def _is_published(method: MethodSummary) -> bool:
    config = method.method_settings.get("lookahead")
    if config is None:
        return bool(method.method_settings["transformers"]) and method.method_settings["assistant"] is None
    return config["preset"] not in ("auto", "autoregressive") and config["memory"] == "request"


DERIVED: dict[str, Callable[[Sequence[Row]], Table]] = {"best published": best_published, "law fit": law_fit}
"""Tables that are more than figures of rows, by the name that a declaration calls them."""
