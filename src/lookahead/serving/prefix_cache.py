"""Keys and values of finished texts, for requests that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

LEAST = 16
"""Tokens that two texts must begin with in common, or nothing is reused."""


class TextRow(Protocol):
    """The keys and values of one text, on any engine.

    Attributes:
        most_pending: How many tokens of a text that is not cached yet the coming step sends at most; any number if
            `None`.
    """

    most_pending: int | None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept."""

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""

    def copy_start(self, other: Any, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them."""

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""

    def set_apart(self) -> None:
        """The text is finished, and only kept for others to begin with: let it take no time from those that run."""


@dataclass(eq=False)
class Prefix:
    """A text that is kept.

    Attributes:
        tokens: Its token ids.
        row: Their keys and values.
        size: Tokens that there is room for.
        start: The first `LEAST` of the tokens: most texts differ there already.
    """

    tokens: NDArray[np.int64]
    row: TextRow
    size: int
    start: list[int]


Text = Sequence[int] | NDArray[np.int64]


def common_start(text: Text, other: Text) -> int:
    """How many tokens two texts begin with in common; 0 where these are fewer than `LEAST`."""
    if len(text) < LEAST or len(other) < LEAST or list(text[:LEAST]) != list(other[:LEAST]):
        return 0
    size = min(len(text), len(other))
    differ = np.flatnonzero(np.asarray(text[:size]) != np.asarray(other[:size]))
    return int(differ[0]) if len(differ) else size


class PrefixCache:
    """Finished texts with their keys and values, the least recently used first.

    A request that begins like one of them copies what they have in common. So do requests that begin like one that
    runs; that is for the caller to look up.

    Attributes:
        held: Tokens that the rows in here have room for.
    """

    def __init__(self) -> None:
        self._kept: list[Prefix] = []
        self.held = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, text: Sequence[int]) -> tuple[Prefix | None, int]:
        """The text in here that has most in common with the beginning of `text`, and how many tokens that is."""
        best, most = None, 0
        for prefix in self._alike(text):
            common = common_start(text, prefix.tokens)
            if common >= most and common:
                best, most = prefix, common
        if best is not None:  # the one used last goes last
            self._kept.remove(best)
            self._kept.append(best)
        return best, most

    def keep(self, text: Sequence[int], row: TextRow, room: int) -> None:
        """Keep the keys and values of a text that is finished, as long as there is room.

        Args:
            text: Its tokens; those behind the end of the row have none.
            row: Its keys and values.
            room: Most tokens to hold from now on.
        """
        tokens = np.array(text[: row.length], dtype=np.int64)
        if len(tokens) < LEAST or row.capacity > room:
            return
        for prefix in self._alike(text):
            common = common_start(tokens, prefix.tokens)
            if common == len(tokens):
                return  # it has all of this one
            if common == len(prefix.tokens):
                self.remove(prefix)  # this one has all of it
        row.set_apart()
        self._kept.append(Prefix(tokens, row, row.capacity, tokens[:LEAST].tolist()))
        self.held += row.capacity
        self.shrink(room)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self.held = 0

    def shrink(self, room: int, but: Prefix | None = None) -> None:
        """Forget the least recently used texts until no more than `room` tokens are held, but not `but`."""
        if self.held <= room:
            return
        for prefix in list(self._kept):
            if prefix is not but:
                self.remove(prefix)
            if self.held <= room:
                return

    def remove(self, prefix: Prefix) -> None:
        """Forget one, if it is still there."""
        if prefix in self._kept:
            self._kept.remove(prefix)
            self.held -= prefix.size

    def _alike(self, text: Sequence[int]) -> list[Prefix]:
        """Those that begin as `text` does."""
        start = list(text[:LEAST])
        return [prefix for prefix in self._kept if prefix.start == start]
