"""The texts of a batch, each with an index like that of `ContextMatches`, in arrays that one loop goes through."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.context_matches import BUCKETS, RUNS, chain_runs

REACH = 1 << 16
"""Tokens of a text that stay within reach, at least; at most twice as many do."""

_LEAST_ROOM = 4096


class TextArrays(NamedTuple):
    """One text in each place.

    Attributes:
        tokens: The tokens that are kept, `[places, room]`.
        lengths: How many these are, `[places]`.
        dropped: How many stood before them, `[places]`.
        newest, earlier: See `MatchArrays`, `[places, runs, buckets]` and `[places, runs, room]`.
        reach: Tokens of each that are kept, at least.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    dropped: NDArray[np.int64]
    newest: NDArray[np.int32]
    earlier: NDArray[np.int32]
    reach: int


class PathTexts:
    """Room for the texts of a batch. The operating system fills its pages when they are first written to.

    Args:
        places: How many texts.
        reach: Tokens of each that stay within reach, at least.
    """

    def __init__(self, places: int, reach: int = REACH) -> None:
        newest = np.empty((places, len(RUNS), BUCKETS), dtype=np.int32)
        lengths, dropped = np.zeros((2, places), dtype=np.int64)
        tokens, earlier = _allocate(places, 1)
        self.arrays = TextArrays(tokens, lengths, dropped, newest, earlier, reach)

    def make_room(self, longest: int) -> None:
        """Make room for texts of up to so many tokens."""
        old, most = self.arrays, 2 * self.arrays.reach
        if min(longest, most) < old.tokens.shape[1]:
            return
        tokens, earlier = _allocate(len(old.lengths), 1 + min(max(2 * longest, _LEAST_ROOM), most))
        for place in np.flatnonzero(old.lengths).tolist():
            end = old.lengths[place] + 1
            tokens[place, :end], earlier[place, :, :end] = old.tokens[place, :end], old.earlier[place, :, :end]
        self.arrays = old._replace(tokens=tokens, earlier=earlier)

    def forget(self, place: int) -> None:
        """There is no text in a place any more."""
        self.arrays.lengths[place] = 0


def _allocate(places: int, room: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    return np.empty((places, room), dtype=np.int64), np.empty((places, len(RUNS), room), dtype=np.int32)


@inner
def _append(place: int, tokens: NDArray[np.int32], begin: int, end: int, texts: TextArrays) -> None:
    """The text in a place goes on with `tokens[begin:end]`."""
    length = texts.lengths[place]
    for at in range(begin, end):
        texts.tokens[place, length + at - begin] = tokens[at]
    texts.lengths[place] = length + end - begin
    chain_runs(texts.tokens[place], length, length + end - begin, texts.newest[place], texts.earlier[place])


@inner
def begin_text(place: int, tokens: NDArray[np.int32], end: int, texts: TextArrays) -> None:
    """A new text in a place, `tokens[:end]`; of a long one the last tokens."""
    begin = 0 if end <= 2 * texts.reach else end - texts.reach
    texts.newest[place, :, :] = -1
    texts.lengths[place] = 0
    texts.dropped[place] = begin
    _append(place, tokens, begin, end, texts)


@inner
def follow_text(place: int, tokens: NDArray[np.int32], end: int, texts: TextArrays) -> None:
    """The text in a place goes on to be `tokens[:end]`."""
    known = texts.dropped[place] + texts.lengths[place]
    if end - texts.dropped[place] > 2 * texts.reach:
        begin_text(place, tokens, end, texts)
    else:
        _append(place, tokens, known, end, texts)


@inner
def is_begun_by(place: int, tokens: NDArray[np.int32], most: int, texts: TextArrays) -> bool:
    """Whether `tokens` begin with the text in a place, as far as its last `most` tokens tell."""
    length, dropped = texts.lengths[place], texts.dropped[place]
    if length == 0 or dropped + length > len(tokens):
        return False
    at = max(length - most, 0)
    while at < length and texts.tokens[place, at] == tokens[dropped + at]:
        at += 1
    return bool(at == length)


@compiled
def precedes(place: int, tokens: NDArray[np.int32], texts: TextArrays) -> bool:
    """Whether the text in a place is what `tokens` begin with."""
    return bool(is_begun_by(place, tokens, len(tokens), texts))
