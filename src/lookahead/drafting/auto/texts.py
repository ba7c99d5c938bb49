"""Texts, and where they have been before: earlier occurrences of their last tokens, and what followed them.

Prompt lookup and the paper's "prompt as reference" draft from this. Text that copies (code, quotations, answers about
a given text) is accepted many tokens at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, inner

RUNS = (8, 4, 2)
"""Lengths of the runs of tokens that are indexed, the longest first."""

LONGEST = 32
"""Longest match that is distinguished, in tokens."""

SEARCHED = 8
"""Most occurrences that a search returns."""

MATCH_CLASSES = (2, 3, 4, 6, 9, 16, 24, 32)
"""Fewest agreeing tokens of each class of matches."""

BUCKETS = 1 << 15
"""Places of a text are looked for by the hash of what they follow, which is one of so many. Texts are usually kept for
twice as many tokens, at least, and at most for four times as many: buckets stay short."""

_PRIME = 2147483647
_FACTOR = 1103515245
LEAST_ROOM = 4096
"""Tokens that there is room for when a text first has any."""


class TextArrays(NamedTuple):
    """One text in each place.

    The places that follow each run of 8, 4 and 2 tokens are chained, the newest first, as compressors do (LZ77). Adding
    a token takes constant time, amortised; a search visits the places of a bucket until it has 8. Each token
    that is kept takes 20 bytes, and each text 393 kB besides: 3 MB for the usual 65,536. The operating system fills
    pages when they are first written to.

    Attributes:
        tokens: The tokens that are kept, `[places, room]`.
        lengths: How many these are, `[places]`.
        dropped: How many stood before them, `[places]`; below 0, so many of those kept are no part of the text, but
            stand before it to be searched.
        newest: For each run length and bucket the last place that follows a run of it, -1 if there is none, `[places,
            runs, buckets]`.
        earlier: For each run length and place the one before it in its bucket, `[places, runs, room]`.
        reach: Tokens of each that are kept, at least.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    dropped: NDArray[np.int64]
    newest: NDArray[np.int32]
    earlier: NDArray[np.int32]
    reach: int


OCCURRENCE = np.dtype([("place", np.int64), ("length", np.int64)])
"""An earlier occurrence of the end of a path: the place in the text of the token that followed, and how many tokens
agree. Those of a node stand the newest first; `NODE` says how many there are."""


@inner
def read_context(place: int, node: int, nodes: NDArray[Any], texts: TextArrays, context: NDArray[np.int64]) -> int:
    """Write the last tokens of the path to a node to `context`, the very last one first; returns how many.

    Args:
        place: That of the text.
        node: One of the tree after it; 0 is the last token of the text, -1 the one before it, and so on.
        nodes: The tree.
        texts: The texts.
        context: Gets as many tokens as it has room for.
    """
    tokens, lengths, dropped, _, _, _ = texts
    size, most = FIRST, len(context)
    while node > 0 and size < most:
        one = nodes[node]
        context[size], node = one["token"], one["parent"]
        size += 1
    at, first = lengths[place] - 1 + node, max(-dropped[place], 0)
    while at >= first and size < most:
        context[size] = tokens[place, at]
        at -= 1
        size += 1
    return size


@inner
def find_matches(
    place: int,
    node: int,
    context: NDArray[np.int64],
    size: int,
    nodes: NDArray[Any],
    texts: TextArrays,
    followed: NDArray[Any],
) -> int:
    """Find where the text has been at the end of a path before: where it has been at the end of the path to its parent,
    and went on with its token; if nowhere, after the longest indexed run that ends the path.

    Args:
        place: That of the text.
        node: The node at the end of the path.
        context: Its last tokens, the very last one first; `size` of them count.
        size: See there.
        nodes: The tree.
        texts: The texts.
        followed: Gets the `OCCURRENCE`s of the node, `[nodes, SEARCHED]`.

    Returns:
        How many there are.
    """
    tokens, lengths, _, newest, earlier, _ = texts
    text, length, one, found = tokens[place], lengths[place], nodes[node], followed[node]
    count = FIRST
    if node > 0:
        before = followed[one["parent"]]
        for match in range(nodes[one["parent"]]["matches"]):
            old, new = before[match], found[count]
            end = old["place"]
            if text[end] == one["token"] and end + 1 < length:
                new["place"], new["length"] = end + 1, min(old["length"] + 1, LONGEST)
                count += 1
    for index in range(len(RUNS)):
        run = RUNS[index]
        if size < run or count > 0:
            continue
        code = FIRST
        for back in range(run):
            code = (code * _FACTOR + context[back] + 1) % _PRIME
        end = np.int64(newest[place, index, code & (BUCKETS - 1)])
        while end >= 0 and count < len(found):
            agreeing = FIRST
            while agreeing < min(size, end) and end < length and context[agreeing] == text[end - 1 - agreeing]:
                agreeing += 1
            if agreeing >= run:
                new = found[count]
                new["place"], new["length"] = end, agreeing
                count += 1
            end = np.int64(earlier[place, index, end])
    one["matches"] = count
    return count


@inner
def append(place: int, tokens: NDArray[np.int64], texts: TextArrays) -> None:
    """A text goes on with these tokens, for which there is room. Their places are chained, each of which follows a run
    of each length."""
    text, newest, earlier = texts.tokens[place], texts.newest[place], texts.earlier[place]
    end = texts.lengths[place]
    for token in tokens:
        text[end] = token
        end += 1
        for index in range(len(RUNS)):
            if end >= RUNS[index]:
                code = FIRST
                for back in range(1, RUNS[index] + 1):
                    code = (code * _FACTOR + text[end - back] + 1) % _PRIME
                bucket = code & (BUCKETS - 1)
                earlier[index, end], newest[index, bucket] = newest[index, bucket], end
    texts.lengths[place] = end


def allocate_texts(places: int, room: int, reach: int) -> TextArrays:
    """Room for texts of so many tokens, of which `reach` to twice as many are kept, at least 16."""
    newest = np.empty((places, len(RUNS), BUCKETS), dtype=np.int32)
    lengths, dropped = np.zeros((2, places), dtype=np.int64)
    tokens, earlier = np.empty((places, room), dtype=np.int64), np.empty((places, len(RUNS), room), dtype=np.int32)
    return TextArrays(tokens, lengths, dropped, newest, earlier, reach)


def with_room(old: TextArrays, places: int, room: int) -> TextArrays:
    """The same texts with room for so many of them, of so many tokens each: as much as there was, or more."""
    new, count = allocate_texts(places, room, old.reach), len(old.lengths)
    new.newest[:count], new.lengths[:count], new.dropped[:count] = old.newest, old.lengths, old.dropped
    for place in np.flatnonzero(old.lengths).tolist():
        end = old.lengths[place] + 1
        new.tokens[place, :end], new.earlier[place, :, :end] = old.tokens[place, :end], old.earlier[place, :, :end]
    return new
