"""Texts with an index of earlier occurrences of their last tokens, and of the tokens that followed.

Prompt lookup and the paper's "prompt as reference" use the same idea. Text that copies (code, quotations, answers
about a given text) is accepted many tokens at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, inner

RUNS = (8, 4, 2)
"""Lengths of the indexed runs of tokens, the longest first."""

LONGEST = 32
"""Maximum counted length of a match, in tokens."""

SEARCHED = 8
"""Maximum number of occurrences per search."""

MATCH_CLASSES = (2, 3, 4, 6, 9, 16, 24, 32)
"""Minimum number of matching tokens of each class of matches."""

BUCKETS = 1 << 15
"""Number of hash buckets per run length; texts usually keep 2 to 4 times this number of tokens."""

_PRIME = 2147483647
_FACTOR = 1103515245
LEAST_ROOM = 4096
"""Initial capacity of a text, in tokens."""


class TextArrays(NamedTuple):
    """Texts with their hash chains, one text per slot.

    Indices after runs of 8, 4 and 2 tokens with the same hash are chained, the newest first, as in LZ77 compressors.
    Adding a token takes constant time, amortised; a search walks a chain until it has 8 matches. Each token takes 20
    bytes, and each text 393 kB: 3 MB for the usual 65,536 tokens. The system maps pages at their first use.

    Attributes:
        tokens: Stored tokens, `[places, room]`.
        lengths: Number of stored tokens, `[places]`.
        dropped: Number of earlier tokens that are no longer stored, `[places]`. If negative, this number of tokens at
            the start of the stored ones precedes the text and is only searched.
        newest: Last index after a run, for each run length and bucket, -1 for none, `[places, runs, buckets]`.
        earlier: Previous index in the same bucket, for each run length and index, `[places, runs, room]`.
        reach: Minimum number of stored tokens of a long text.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    dropped: NDArray[np.int64]
    newest: NDArray[np.int32]
    earlier: NDArray[np.int32]
    reach: int


OCCURRENCE = np.dtype([("place", np.int64), ("length", np.int64)])
"""An earlier occurrence of the end of a path: the index in the text of the next token, and the number of matching
tokens. A node's occurrences are sorted from the newest; `NODE` has their number."""


@inner
def read_context(place: int, node: int, nodes: NDArray[Any], texts: TextArrays, context: NDArray[np.int64]) -> int:
    """Write the last tokens of the path to a node to `context`, the very last one first; return their number.

    Args:
        place: Slot of the text.
        node: Node of its tree; 0 is the last token of the text, -1 the one before it, and so on.
        nodes: The tree.
        texts: The texts.
        context: Output; its length is the maximum number of tokens.
    """
    tokens, lengths, dropped, _, _, _ = texts
    size = FIRST
    capacity = len(context)
    while node > 0 and size < capacity:
        one = nodes[node]
        context[size], node = one["token"], one["parent"]
        size += 1
    at = lengths[place] - 1 + node
    first = max(-dropped[place], 0)
    while at >= first and size < capacity:
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
    """Find earlier occurrences of the path's suffix: extend the parent's matches, else look up the longest n-gram.

    Args:
        place: Slot of the text.
        node: The node at the end of the path.
        context: Its last tokens, the very last one first.
        size: Number of valid tokens in `context`.
        nodes: The tree.
        texts: The texts.
        followed: Output for the `OCCURRENCE`s of the node, `[nodes, SEARCHED]`.

    Returns:
        Number of occurrences.
    """
    tokens, lengths, _, newest, earlier, _ = texts
    text = tokens[place]
    length = lengths[place]
    one = nodes[node]
    occurrence = followed[node]
    count = FIRST
    if node > 0:
        before = followed[one["parent"]]
        for match in range(nodes[one["parent"]]["matches"]):
            old = before[match]
            new = occurrence[count]
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
        while end >= 0 and count < len(occurrence):
            agreeing = FIRST
            while agreeing < min(size, end) and end < length and context[agreeing] == text[end - 1 - agreeing]:
                agreeing += 1
            if agreeing >= run:
                new = occurrence[count]
                new["place"], new["length"] = end, agreeing
                count += 1
            end = np.int64(earlier[place, index, end])
    one["matches"] = count
    return count


@inner
def append(place: int, tokens: NDArray[np.int64], texts: TextArrays) -> None:
    """Extend a text by tokens, and add their indices to the hash chains. There must be enough capacity."""
    text = texts.tokens[place]
    newest = texts.newest[place]
    earlier = texts.earlier[place]
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
    """Allocate arrays for `places` texts of `room` tokens; long texts keep `reach` (>= 16) to `2 * reach` tokens."""
    newest = np.empty((places, len(RUNS), BUCKETS), dtype=np.int32)
    lengths, dropped = np.zeros((2, places), dtype=np.int64)
    tokens = np.empty((places, room), dtype=np.int64)
    earlier = np.empty((places, len(RUNS), room), dtype=np.int32)
    return TextArrays(tokens, lengths, dropped, newest, earlier, reach)


def with_room(old: TextArrays, places: int, room: int) -> TextArrays:
    """Return copies of the texts with new capacities, which must not be smaller."""
    new = allocate_texts(places, room, old.reach)
    count = len(old.lengths)
    new.newest[:count], new.lengths[:count], new.dropped[:count] = old.newest, old.lengths, old.dropped
    for place in np.flatnonzero(old.lengths).tolist():
        end = old.lengths[place] + 1
        new.tokens[place, :end], new.earlier[place, :, :end] = old.tokens[place, :end], old.earlier[place, :, :end]
    return new
