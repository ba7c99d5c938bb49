"""Tables of Markdown pages, made from rows by declarations in a TOML file.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; the file declares its content.
`benchmarks/tables.toml` explains the keys.
"""

from __future__ import annotations

import argparse
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from lookahead.bench.rows import Row, named, read_lines
from lookahead.bench.scaling_law import law_fit
from lookahead.bench.summary import MethodSummary, RunSet
from lookahead.errors import InvalidArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOTHING = "–"

COLUMNS: dict[str, tuple[str, str]] = {
    "nodes": ("nodes per step", "{mean_nodes:.1f}"),
    "S": ("S", "{step_compression:.2f}"),
    "range": ("S of a single prompt", "{S.least:.2f} to {S.most:.2f}"),
    "speed": ("speed over transformers", "{over_reference}"),
    "engine speed": ("over plain engine", "{over_plain}"),
    "cycles": ("in cycles", "{cycle_share:.0%}"),
    "same": ("identical outputs", "{same} of {compared}"),
    "prompts": ("prompts", "{prompt.distinct}"),
    "class": ("class", "{class}"),
    "runs on": ("runs on", "{runs_on}"),
    "why": ("why", "{reason}"),
}
"""Title and format of named columns."""

_MARKED = re.compile(r"(?ms)^<!-- table: (\S+) -->$\n.*?^<!-- end -->$")
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
"""Titles, and cells of each line."""

Where = Mapping[str, Any]
"""Required values of fields, by path."""


def fill_tables(arguments: Sequence[str], notes: Console) -> int:
    """Update the tables of Markdown pages from rows.

    A table is between `<!-- table: NAME -->` and `<!-- end -->`; TABLES declares its rows, lines and columns.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks tables", description=fill_tables.__doc__)
    parser.add_argument("tables", type=Path, help="TOML file that declares tables")
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files with tables")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; the exit status is 1 if a table is outdated"
    )
    options = parser.parse_args(arguments)
    tables, is_old = TableFile(options.tables), False
    for path in options.pages:
        old = path.read_text(encoding="utf-8")
        new = tables.fill(old)
        if new != old:
            is_old = True
            notes.print(f"{path}: {'not what the rows say' if options.check else 'written'}", soft_wrap=True)
            if not options.check:
                with named(path):
                    path.write_text(new, encoding="utf-8")
    return int(is_old and options.check)


class TableFile:
    """Declarations of tables in a file.

    Args:
        path: TOML file.

    Raises:
        InvalidArgumentError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._specs: dict[str, Row] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"cannot read the tables {path}: {error}") from error
        self._path = path

    def fill(self, page: str) -> str:
        """Return the page with all of its tables updated.

        Raises:
            InvalidArgumentError: A table is not declared, or cannot be made from its rows.
        """
        return _MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{self.table(found[1])}\n\n<!-- end -->", page)

    def table(self, name: str) -> str:
        """Make one table in Markdown.

        Raises:
            InvalidArgumentError: The table is not declared, or cannot be made from its rows.
        """
        try:
            spec = self._specs[name]
            files = [spec["rows"]] if isinstance(spec["rows"], str) else spec["rows"]
            return markdown(*build(spec, [row for file in files for row in _read(self._path.parent / file)]))
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise InvalidArgumentError(f"{self._path}: table {name!r} cannot be made: {error!r}") from error


def build(spec: Row, rows: Sequence[Row]) -> Table:
    """Build a table from rows, by its declaration."""
    limits, names = spec.get("where", {}), spec.get("names", {})
    selected = sorted((row for row in rows if _matches(row, limits)), key=lambda row: row.get("order", 0))
    if spec.get("derived") == "law fit":
        return law_fit(selected)
    runs = RunSet(of_suite) if (of_suite := [row for row in rows if "settings" in row]) else None
    lines: list[Row] = spec.get("lines") or [
        {"cells": [_name(value, names) for value in values], "where": dict(zip(spec["by"], values, strict=True))}
        for values in _distinct(selected, spec["by"])
    ]
    columns = list(_columns(spec, selected, names))
    elsewhere = {name for cell in (*columns, *lines) for name in cell.get("over", {})}
    remaining = {name: value for name, value in limits.items() if name not in elsewhere}
    rows = [row for row in rows if _matches(row, remaining)]  # rows that cells may be compared with
    body = [[*line["cells"], *_cells(rows, selected, line, columns, limits, runs)] for line in lines]
    return [*(spec.get("head") or spec["by"]), *(column["title"] for column in columns)], body


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown; the first column is text, the others are figures."""
    head = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    return "\n".join([*head, *(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)])


class Figures(string.Formatter):
    """Formatter of one cell, with figures of its rows by name.

    Args:
        column: Declaration of the cell.
        rows: Rows of the cell.
        base: Rows to compare with.
        runs: All runs of the suite; `None` for rows of a probe.
    """

    def __init__(self, column: Row, rows: Sequence[Row], base: Sequence[Row] = (), runs: RunSet | None = None) -> None:
        self._column, self._rows, self._base, self._runs = column, rows, base, runs

    def cell(self) -> str:
        """Text of the cell; a dash if a figure is missing."""
        try:
            return self.vformat(self._column["format"], (), {})
        except _MissingError:
            return NOTHING

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Look up a figure by name; overrides `string.Formatter`."""
        value = self.value(field_name)
        if value is None:
            raise _MissingError
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a figure, or each element of a list; overrides `string.Formatter`."""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return " ".join(format(one, format_spec) for one in (value if isinstance(value, list) else [value]))

    def value(self, name: str) -> Any:
        """Figure by name, or ratio of two figures; `None` if missing."""
        if name == "named":
            found = self.value(self._column["value"])
            return None if found is None else found * self._column.get("scale", 1)
        if name == "ratio":
            return _quotient(self.value("named"), Figures(self._column, self._base, runs=self._runs).value("named"))
        if "/" in name:
            return _quotient(*map(self.value, name.split("/")))
        first, *rest = name.split(".")
        if self._runs is not None and (hasattr(MethodSummary, first) or first == "size"):
            found = getattr(MethodSummary(self._rows, self._runs), first)
            return getattr(found, rest[0]) if rest and found is not None else found
        path, _, last = name.rpartition(".")
        values = [
            value for row in self._rows if (value := field(row, path if last in _STATISTICS else name)) is not None
        ]
        if last in _STATISTICS:
            return _STATISTICS[last](values) if values else None
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} has several values, such as {values[0]!r} and {values[-1]!r}")
        return values[0] if values else None


class _MissingError(Exception):
    """Raised for a figure that was not measured."""


def _quotient(upper: Any, lower: Any) -> Any:
    return None if upper is None or not lower else upper / lower


def field(row: Row, name: str) -> Any:
    """Value of a field, by path; `None` if there is no such field."""
    value: Any = row
    for part in name.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
    return value


_read = cache(read_lines)


def _matches(row: Row, where: Where) -> bool:
    return all(_fits(field(row, name), condition) for name, condition in where.items())


def _fits(value: Any, condition: Any) -> bool:
    if isinstance(condition, list):
        return any(_fits(value, one) for one in condition)
    if isinstance(condition, str) and condition.startswith("~"):
        return re.search(condition[1:], str(value)) is not None
    return bool(value == condition)


def _distinct(rows: Sequence[Row], fields: Sequence[str]) -> list[tuple[Any, ...]]:
    """Distinct values of fields in rows, sorted by the first field first.

    Numbers are in ascending order, other values in order of appearance.
    """
    names = list(dict.fromkeys(tuple(field(row, name) for name in fields) for row in rows))
    first = [list(dict.fromkeys(values)) for values in zip(*names, strict=True)]
    first = [sorted(values) if all(isinstance(value, (int, float)) for value in values) else values for values in first]
    return sorted(names, key=lambda values: [order.index(value) for order, value in zip(first, values, strict=True)])


def _name(value: Any, names: Mapping[str, str]) -> str:
    return names.get(str(value), f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def _columns(spec: Row, rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[Row]:
    """Yield the columns; a column with a brace in its title is repeated for each value of `across`."""
    across = spec.get("across", [])
    for column in spec["columns"]:
        if isinstance(column, str):
            column = dict(zip(("title", "format"), COLUMNS[column], strict=True))
        for values in _distinct(rows, across) if "{" in column["title"] else [()]:
            where = {**dict(zip(across, values, strict=False)), **column.get("where", {})}
            title = column["title"].format(*(_name(value, names) for value in values))
            yield {**column, "where": where, "title": title}


def _cells(
    rows: Sequence[Row], selected: Sequence[Row], line: Row, columns: Sequence[Row], limits: Where, runs: RunSet | None
) -> Iterator[str]:
    """Yield the cells of a line; `selected` are the `rows` of the table's files within `limits`."""
    here = line.get("where", {})
    of_line = [row for row in selected if _matches(row, here)]
    for column in columns:
        cell, of_cell, base = {**column, **line}, [row for row in of_line if _matches(row, column["where"])], []
        if "over" in cell:
            over: Where = cell["over"]
            conditions = [{key: where[key] for key in where.keys() - over} for where in (limits, here, column["where"])]
            base = [row for row in rows if all(_matches(row, where) for where in (over, *conditions))]
        yield Figures(cell, of_cell, base, runs).cell() if of_cell else NOTHING
