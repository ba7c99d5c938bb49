"""Where the text has been before: earlier occurrences of its last tokens, and what followed them.

Prompt lookup and the paper's "prompt as reference" draft from this. Text that copies (code, quotations, answers about
a given text) is accepted many tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.compiled import IS_COMPILED, compiled, loop_arrays
from lookahead.errors import InvalidArgumentError

RUNS = (8, 4, 2)
"""Lengths of the runs of tokens that are indexed, the longest first."""

LONGEST = 32
"""Longest agreement that is told apart, in tokens."""

SEARCHED = 8
"""Most occurrences that a search returns."""

_BUCKET_BITS = 15
_PRIME = 2147483647
_FACTOR = 1103515245
_VISITED = 64
_FEW = 8
"""Tokens up to which loops are faster than operations on arrays even where they are not compiled."""


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the last tokens of a context.

    Attributes:
        place: Place in `ContextMatches.text` of the token that followed it.
        length: How many tokens agree, counted up to `LONGEST`.
    """

    place: int
    length: int


@compiled
def find_matches(
    context: NDArray[np.int64],
    size: int,
    text: NDArray[np.int64],
    end: int,
    newest: NDArray[np.int32],
    earlier: NDArray[np.int32],
    places: NDArray[np.int64],
    lengths: NDArray[np.int64],
    row: int,
) -> int:
    """Write the occurrences of the longest indexed run that ends `context` to a row of `places` and `lengths`.

    Args:
        context: Its tokens, the last one first.
        size: How many of them count.
        text: The text, of which the first `end` tokens count.
        end: See there.
        newest: For each run length and bucket the last place that follows a run of it, -1 if there is none.
        earlier: For each run length and place the one before it in its bucket.
        places: Gets the places of the tokens that followed, newest first, `[rows, SEARCHED]`.
        lengths: Gets how many tokens agree there, likewise.
        row: The row that they are written to.

    Returns:
        How many were found.
    """
    count = 0
    for index in range(len(RUNS)):
        run = RUNS[index]
        if size < run:
            continue
        code = 0
        for back in range(run):
            code = (code * _FACTOR + context[back] + 1) % _PRIME
        place = newest[index, code & ((1 << _BUCKET_BITS) - 1)]
        visited = 0
        while place >= 0 and visited < _VISITED and count < places.shape[1]:
            visited += 1
            if place < end:
                most = min(size, place)
                length = 0
                while length < most and context[length] == text[place - 1 - length]:
                    length += 1
                if length >= run:
                    places[row, count] = place
                    lengths[row, count] = length
                    count += 1
            place = earlier[index, place]
        if count > 0:
            break
    return count


@compiled
def _chain_runs(
    text: NDArray[np.int64], begin: int, end: int, newest: NDArray[np.int32], earlier: NDArray[np.int32]
) -> None:
    """Chain the places after `begin`, up to and with `end`, each of which follows a run of each length."""
    for index in range(len(RUNS)):
        run = RUNS[index]
        for place in range(max(begin + 1, run), end + 1):
            code = 0
            for back in range(run):
                code = (code * _FACTOR + text[place - 1 - back] + 1) % _PRIME
            bucket = code & ((1 << _BUCKET_BITS) - 1)
            earlier[index, place] = newest[index, bucket]
            newest[index, bucket] = place


class ContextMatches:
    """Finds earlier occurrences of the longest suffix of a context in prompt and output, newest first.

    The places that follow each run of 8, 4 and 2 tokens are chained, the newest first, as compressors do (LZ77). Adding
    a token takes constant time, amortised; a search visits at most 64 places a run length and returns 8. The text keeps
    its last `memory` to `2 * memory` tokens; each takes 20 bytes, and the index 393 kB besides: 3 MB for the usual
    65,536.

    Args:
        memory: Tokens that stay within reach, at least; 16 or more.

    Raises:
        InvalidArgumentError: `memory` is too small.
    """

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 16:
            raise InvalidArgumentError(f"memory={memory} is out of range; it must be at least 16 tokens")
        self.memory = memory
        self.tokens = np.zeros(0, dtype=np.int64)
        self.length = 0
        self.newest = np.full((len(RUNS), 1 << _BUCKET_BITS), -1, dtype=np.int32)
        self.earlier = np.zeros((len(RUNS), 1), dtype=np.int32)
        self._context = np.zeros(LONGEST, dtype=np.int64)
        self._places = np.zeros((1, SEARCHED), dtype=np.int64)
        self._lengths = np.zeros((1, SEARCHED), dtype=np.int64)

    @property
    def text(self) -> NDArray[np.int64]:
        """The tokens within reach."""
        return self.tokens[: self.length]

    def start(self, prompt: Sequence[int] | NDArray[np.int64]) -> None:
        """Begin a text."""
        self.length = 0
        self.newest.fill(-1)
        self.extend(prompt)

    def extend(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """The text goes on."""
        new = np.asarray(tokens, dtype=np.int64)
        if self.length + len(new) > 2 * self.memory:
            kept = np.concatenate([self.text, new])[-self.memory :]
            self.start(kept)
            return
        begin, self.length = self.length, self.length + len(new)
        self._make_room()
        self.tokens[begin : self.length] = new
        if IS_COMPILED or len(new) <= _FEW:
            text, newest, earlier = loop_arrays(self.tokens, self.newest, self.earlier)
            _chain_runs(text, begin, self.length, newest, earlier)
            return
        for index, run in enumerate(RUNS):
            self._chain(index, run, max(begin + 1, run))

    def find(self, context: Sequence[int]) -> list[Match]:
        """Occurrences of the last tokens of `context` that something follows: the longest first, then the newest.

        Of the runs of 8, 4 and 2 tokens the longest that occurs counts; shorter agreements are not looked for then.

        Args:
            context: The text so far, or its last tokens, and whatever is drafted after it.
        """
        size = min(len(context), LONGEST)
        self._context[:size] = np.asarray(context[len(context) - size :], dtype=np.int64)[::-1]
        count = find_matches(
            self._context, size, self.tokens, self.length, self.newest, self.earlier, self._places, self._lengths, 0
        )
        found = [Match(int(p), int(n)) for p, n in zip(self._places[0, :count], self._lengths[0, :count], strict=True)]
        return sorted(found, key=lambda match: -match.length)

    def _make_room(self) -> None:
        room = len(self.tokens)
        if self.length < room:
            return
        room = min(max(2 * self.length, 4096), 2 * self.memory) + 1
        tokens = np.zeros(room, dtype=np.int64)
        tokens[: len(self.tokens)] = self.tokens
        earlier = np.full((len(RUNS), room), -1, dtype=np.int32)
        earlier[:, : self.earlier.shape[1]] = self.earlier
        self.tokens, self.earlier = tokens, earlier

    def _chain(self, index: int, run: int, first: int) -> None:
        """Chain the places from `first` to the end of the text, each of which follows a run of `run` tokens."""
        if first > self.length:
            return
        places = np.arange(first, self.length + 1)
        codes = np.zeros(len(places), dtype=np.int64)
        for back in range(run):
            codes = (codes * _FACTOR + self.tokens[places - 1 - back] + 1) % _PRIME
        buckets = codes & ((1 << _BUCKET_BITS) - 1)
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_places = buckets[order], places[order]
        begins = np.flatnonzero(np.diff(sorted_buckets, prepend=-1))
        before = np.concatenate([[-1], sorted_places[:-1]])
        before[begins] = self.newest[index, sorted_buckets[begins]]
        self.earlier[index, sorted_places] = before
        ends = np.concatenate([begins[1:], [len(places)]]) - 1
        self.newest[index, sorted_buckets[ends]] = sorted_places[ends]
