"""Raw results on the disk: JSON lines that grow run by run."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lookahead.bench.rows import Key, Request, Row, key_of
from lookahead.errors import InvalidArgumentError

_NEEDED = ("model", "task", "method", "prompt", "repeat", "order", "reference", "output", "settings")


class ResultsFile:
    """The rows of one file, on the disk and in memory. A context manager, which closes the file."""

    def __init__(self, path: Path, circumstances: Mapping[str, Any], *, restart: bool = False) -> None:
        """Open a file to go on with it, or begin it.

        Args:
            path: Where it is.
            circumstances: Versions and machine of this run.
            restart: Throw the rows of an existing file away.

        Raises:
            InvalidArgumentError: The file holds something else.
            OSError: It cannot be written.
        """
        self.path = path
        self._circumstances = dict(circumstances)
        kept = read_rows(path) if path.exists() and not restart else []
        self._rows: dict[Key, Row] = {key_of(row): row for row in kept}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite()
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    @property
    def rows(self) -> list[Row]:
        """All rows, oldest first."""
        return list(self._rows.values())

    def append(self, row: Row) -> None:
        """Add a row, on the disk first."""
        self._file.write(_line(row))
        self._file.flush()
        self._rows[key_of(row)] = row

    def drop(self, keys: Collection[Key]) -> None:
        """Take rows out."""
        if not any(key in self._rows for key in keys):
            return
        self._file.close()
        self._rows = {key: row for key, row in self._rows.items() if key not in keys}
        self._rewrite()
        self._file = self.path.open("a", encoding="utf-8")

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse to go on where a row of the same names was measured in another way.

        Raises:
            InvalidArgumentError: There is such a row; the message says what is different.
        """
        for request in requests:
            row = self._rows.get(request.key)
            if row is None:
                continue
            now = {**request.settings(), **self._circumstances}
            then = {**row["settings"], **{name: row.get(name) for name in self._circumstances}}
            for name, value in now.items():
                if then.get(name) != value:
                    raise InvalidArgumentError(
                        f"{self.path} measured {request.method.name!r} on {request.prompt.id!r} with another {name} "
                        f"({_difference(then.get(name), value)}); choose another --output, or begin anew with --restart"
                    )

    def _rewrite(self) -> None:
        """Write all rows anew, so that a line cut off by a crash is gone before rows are added."""
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text("".join(map(_line, self._rows.values())), encoding="utf-8")
        os.replace(part, self.path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, also of one that was compressed with gzip.

    A last line without an end was being written when the power went, and does not count.

    Raises:
        InvalidArgumentError: The file cannot be read, or holds something else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the results {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(f"{path}, line {number} is no JSON ({error})") from error
        if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
            raise InvalidArgumentError(f"{path}, line {number} is no result of `lookahead bench run`")
        rows.append(row)
    return rows


def read_files(paths: Sequence[Path]) -> list[Row]:
    """The rows of several files as if they were one; of a run that is in two of them the last row counts.

    Raises:
        InvalidArgumentError: A file cannot be read, or rows of one task and method cannot be put into one table.
    """
    rows = {key_of(row): row for path in paths for row in read_rows(path)}
    first: dict[tuple[str, str, str], Any] = {}
    for row in rows.values():
        how = {name: row.get(name) for name in ("machine", "versions")}
        how |= {name: row["settings"][name] for name in ("model", "method")}
        known = first.setdefault((row["model"], row["task"], row["method"]), how)
        if known != how:
            raise InvalidArgumentError(
                f"{', '.join(map(str, paths))}: {row['method']!r} on {row['task']!r} was measured in two ways "
                f"({_difference(known, how)}); make a report of each"
            )
    return list(rows.values())


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def _difference(then: Any, now: Any) -> str:
    """The first value that is another one."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            if then.get(name) != now.get(name):
                return f"{name}: {_difference(then.get(name), now.get(name))}"
    return f"{then!r} then, {now!r} now"
