"""Whether outputs are those of plain `model.generate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lookahead.bench.rows import Row

MOST_SHOWN = 10
"""Differences that a command lists one by one."""


@dataclass(frozen=True)
class Difference:
    """An output that is not the reference's.

    Attributes:
        row: The run.
        position: The first new token that differs, counted from 0; the length of the shorter text if it is the
            beginning of the other.
        is_error: Whether they had to be identical.
    """

    row: Row
    position: int
    is_error: bool

    def __str__(self) -> str:
        row = self.row
        return (
            f"{row['method']} on {row['prompt']} ({row['model']}, {row['task']}, pass {row['repeat'] + 1}): differs "
            f"from the reference at new token {self.position}"
        )


class Reference:
    """The outputs of the reference method, by prompt."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._outputs: dict[tuple[str, str, str], list[int]] = {}
        for row in rows:
            if row["reference"]:
                self._outputs.setdefault(_prompt_of(row), row["output"])

    def has(self, row: Row) -> bool:
        """Whether there is something to compare the row with."""
        return _prompt_of(row) in self._outputs

    def difference(self, row: Row) -> Difference | None:
        """How the row differs; `None` if it does not, or if the reference has not run."""
        expected = self._outputs.get(_prompt_of(row))
        if expected is None:
            return None
        position = first_difference(row["output"], expected)
        return None if position is None else Difference(row, position, bool(row["exact"]))


def differences(rows: Sequence[Row]) -> list[Difference]:
    """All outputs that are not the reference's."""
    reference = Reference(rows)
    found = (reference.difference(row) for row in rows)
    return [difference for difference in found if difference is not None]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs; `None` for identical texts."""
    if list(output) == list(expected):
        return None
    pairs = zip(output, expected, strict=False)  # one may be the beginning of the other
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(expected)))


def _prompt_of(row: Row) -> tuple[str, str, str]:
    return (row["model"], row["task"], row["prompt"])
