"""Files of JSON lines: prompts, and rows of results that are appended run by run."""

from __future__ import annotations

import gzip
import json
import os
import platform
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lookahead.backends.transformers.findings import device_name
from lookahead.bench.suite import TaskSpec
from lookahead.core.files import TEXT, replaced
from lookahead.errors import InvalidArgumentError
from lookahead.values import read_text
from lookahead.version import __version__


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Type and name of a device, and the number of CPU threads."""
    return {"type": device.type, "device": device_name(device), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Versions of lookahead, torch, transformers and Python."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"lookahead": __version__, **libraries, "python": platform.python_version()}


Row = dict[str, Any]
Key = tuple[str, str, str, str, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """Key of a result row."""
    return (row["model"], row["task"], row["method"], row["prompt"], row["repeat"])


_NEEDED = ("model", "task", "method", "prompt", "repeat", "order", "reference", "output", "settings")

_LONGEST_ROW = 1 << 24
"""Maximum bytes of a first row; a longer first line is not a row."""


class RowsFile:
    """Rows of one file, on disk and in memory, by key. As a context manager it closes the file."""

    def __init__(self, path: Path, rows: Sequence[Row], key: Callable[[Row], Hashable]) -> None:
        """Write the file with the rows to keep, without a last line that a crash has cut off.

        Args:
            path: Path of the file. Missing folders are made, and a symbolic link is kept.
            rows: Rows to begin with, from `kept_lines`.
            key: Function that returns the key of a row.
        """
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._key = key
        self._rows: dict[Hashable, list[Row]] = {}
        self._add(rows)
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite()
        except OSError as error:
            raise InvalidArgumentError(
                f"cannot write to {path}: {error.strerror}; make room, or choose another --output"
            ) from error

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(self, *error: object) -> None:
        with named(self.path):  # closing flushes once more, which may fail
            self._file.close()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def __getitem__(self, key: Hashable) -> Row:
        return self._rows[key][0]

    @property
    def rows(self) -> list[Row]:
        """All rows, oldest first."""
        return [row for rows in self._rows.values() for row in rows]

    def append(self, *rows: Row) -> None:
        """Append rows, on disk first.

        The first rows are written with the whole file: a file with an incomplete first row would not be recognised.
        """
        if not self._rows:
            self._file.close()
            self._add(rows)
            self._rewrite()
            return
        with named(self.path):
            self._file.write("".join(map(_line, rows)))
            self._file.flush()
        self._add(rows)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Remove the rows with these keys."""
        if any(key in self._rows for key in keys):
            self._file.close()
            self._rows = {key: row for key, row in self._rows.items() if key not in keys}
            self._rewrite()

    def _add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._rows.setdefault(self._key(row), []).append(row)

    def _rewrite(self) -> None:
        with named(self.path):
            with replaced(self._target) as file:
                file.writelines(map(_line, self.rows))
            self._file = self._target.open("a", **TEXT)


def check_same(path: Path, then: Row, now: Row, what: str = "") -> None:
    """Check that row `then` of a file has the settings `now`; `what` describes the row in the error.

    Raises:
        InvalidArgumentError: A value differs; the message names it.
    """
    for name, value in now.items():
        if then.get(name) != value:
            raise InvalidArgumentError(
                f"{path} measured{what} with another {name} ({_difference(then.get(name), value)}); choose another "
                "--output, or start this file over with --restart"
            )


def kept_lines(path: Path, is_ours: Callable[[Row], bool], *, restart: bool = False) -> list[Row]:
    """Read the rows of a file that a run continues; empty if the file does not exist, or with `restart`.

    Args:
        path: Path of the file.
        is_ours: Whether a row has the format of this run. Only the first row is checked.
        restart: Whether to discard the rows.

    Raises:
        InvalidArgumentError: The file is compressed, is not a regular file, cannot be read, or has other content.
    """
    if (compressed := _compressed(path)).exists():
        raise InvalidArgumentError(f"{compressed} is compressed, and rows cannot be added; run gunzip {compressed}")
    if not path.exists():
        return []
    if not path.is_file():  # reading a device may never end
        raise InvalidArgumentError(f"{path} is not a regular file; choose another --output")
    with _readable(path), path.open("rb") as file:
        first = file.readline(_LONGEST_ROW)
    row = _object(first) if first.endswith(b"\n") else None
    if first and (row is None or not is_ours(row)):
        raise InvalidArgumentError(
            f"{path} does not begin with a row of this command, and was left unchanged; choose another --output"
        )
    return [] if restart else read_lines(path)


def _compressed(path: Path) -> Path:
    return path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")


def read_lines(path: Path) -> list[Row]:
    """Read the objects of a file of JSON lines, plain or compressed, with or without `.gz` in `path`.

    A crash may have cut off the last line. It is ignored if it is incomplete and begins like another row.

    Raises:
        InvalidArgumentError: The file cannot be read, or a line is not a JSON object.
    """
    path = path if path.exists() else _compressed(path)
    with _readable(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = content.split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _object(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines) or not _is_half(line, rows):
            raise InvalidArgumentError(f"{path}, line {number} is not a JSON object")
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"cannot read the results {path}: {reason}; give the path of a readable file"
        ) from error


def _object(line: bytes) -> Row | None:
    """JSON object in a line; `None` if the line is something else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_half(line: bytes, rows: Sequence[Row]) -> bool:
    """Whether a last line is empty or an incomplete row, which begins with the first key of another row."""
    beginnings = {b"{" + json.dumps(next(iter(row), "")).encode() for row in rows}
    return not line or any(line.startswith(one) or one.startswith(line) for one in beginnings)


def is_result(row: Row) -> bool:
    """Whether a row is a result of `lookahead bench run`."""
    return row.keys() >= set(_NEEDED)


def results(path: Path, rows: list[Row]) -> list[Row]:
    """Return `rows` after a check that all are results of `lookahead bench run`.

    Raises:
        InvalidArgumentError: A row is not; the message names its line.
    """
    for number, row in enumerate(rows, start=1):
        if not is_result(row):
            raise InvalidArgumentError(f"{path}, line {number} is not a result of `lookahead bench run`")
    return rows


def _difference(then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            if then.get(name) != now.get(name):
                return f"{name}: {_difference(then.get(name), now.get(name))}"
    return f"{then!r} then, {now!r} now"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file's name to errors without one, for example of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class Prompt:
    """Prompt of a task.

    Attributes:
        id: Id in the file; name of file and line if the line has none.
        number: Index in the file.
        text: Text of the prompt.
        task: Field `task` in the file; empty without one.
        fault: Error message about a prompt without a usable text; empty otherwise.
    """

    id: str
    number: int
    text: str
    task: str = ""
    fault: str = ""


def read_prompts(task: TaskSpec, limit: int | None = None, *, faulty: bool = False) -> list[Prompt]:
    """Read the prompts of a task, in the order of the file, at most `limit` of its selection.

    With `faulty`, prompts without a usable text are returned too, with the error in `fault`.

    Raises:
        InvalidArgumentError: The file cannot be read, or a line is malformed; the message names the line.
    """
    lines = read_text(task.data, "the file of prompts").split("\n")
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _prompt(task, line, f"{task.data.name}, line {number}", len(prompts))
            if prompt.fault and not faulty:
                raise InvalidArgumentError(prompt.fault)
            prompts.append(prompt)
    if not prompts:
        raise InvalidArgumentError(
            f"{task.data} contains no prompts; write a JSON object with `id` and `prompt` on each line"
        )
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise InvalidArgumentError(f"{task.data} has the same `id` twice; make them different")
    if task.only is not None:
        prompts = [prompt for prompt in prompts if f"{prompt.task}/".startswith(f"{task.only}/")]
        if not prompts:
            raise InvalidArgumentError(
                f"task {task.name!r}: {task.data.name} contains no prompts of only={task.only!r}"
            )
    return prompts[:: task.every][: task.prompts][:limit]


def _prompt(task: TaskSpec, line: str, where: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return Prompt(where, number, "", fault=f"{where} is not JSON ({error})")
    if not isinstance(row, dict) or "id" not in row:
        return Prompt(where, number, "", fault=f"{where} needs an `id`")
    value: Any = row.get(task.field) if task.field else row.get("prompt", row.get("turns"))
    if isinstance(value, list) and value:
        value = value[0]
    fault = ""
    if not isinstance(value, str) or not value:
        names = f"`{task.field}`, as task {task.name!r} says" if task.field else "`prompt` or `turns`"
        value = ""
        fault = f"{where} needs a text in {names}"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        fault = f"{where} has half of a surrogate pair in its text; write both halves or none"
    return Prompt(str(row["id"]), number, value, str(row.get("task", "")), fault)


def encode(prompt: Prompt, task: TaskSpec, tokenizer: PreTrainedTokenizerBase, context: int | None) -> torch.Tensor:
    """Encode a prompt, cut so that the context of the model has room for `max_new_tokens`. Shape [1, S], int64.

    Raises:
        InvalidArgumentError: The context has no room for a prompt, or the prompt has no tokens.
    """
    room = task.max_prompt_tokens
    if context is not None:
        if task.max_new_tokens >= context:
            raise InvalidArgumentError(
                f"max_new_tokens={task.max_new_tokens} of task {task.name!r} leaves no room for a prompt: the model's "
                f"context is {context}"
            )
        room = min(room or context, context - task.max_new_tokens)
    ids: list[int] = tokenizer(prompt.text).input_ids
    if not ids:
        raise InvalidArgumentError(f"prompt {prompt.id!r} of task {task.name!r} has no tokens")
    return torch.tensor([_cut(ids, room, task.keep, tokenizer.bos_token_id)])


def _cut(ids: Sequence[int], room: int | None, keep: str, bos_token: int | None) -> list[int]:
    """Cut tokens to at most `room` from one end of a text; a leading BOS token is kept."""
    if room is None or len(ids) <= room:
        return list(ids)
    if keep == "beginning":
        return list(ids[:room])
    first = [ids[0]] if ids[0] == bos_token and room > 1 else []
    return [*first, *ids[len(ids) - room + len(first) :]]
