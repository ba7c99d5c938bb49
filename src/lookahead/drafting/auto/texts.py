"""Texts, and where they have been before: earlier occurrences of their last tokens, and what followed them.

Prompt lookup and the paper's "prompt as reference" draft from this. Text that copies (code, quotations, answers about
a given text) is accepted many tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner
from lookahead.drafting.auto.proposals import Nodes, Proposals, proposal_of
from lookahead.errors import InvalidArgumentError

RUNS = (8, 4, 2)
"""Lengths of the runs of tokens that are indexed, the longest first."""

LONGEST = 32
"""Longest match that is distinguished, in tokens."""

SEARCHED = 8
"""Most occurrences that a search returns."""

MATCH_CLASSES = (2, 3, 4, 6, 9, 16, 24, 32)
"""Fewest agreeing tokens of each class of matches."""

REACH = 1 << 16
"""Tokens of a text that stay within reach, at least; at most twice as many do."""

BUCKETS = 1 << 15
_PRIME = 2147483647
_FACTOR = 1103515245
_VISITED = 64
_LEAST_ROOM = 4096


class TextArrays(NamedTuple):
    """One text in each place.

    Attributes:
        tokens: The tokens that are kept, `[places, room]`.
        lengths: How many these are, `[places]`.
        dropped: How many stood before them, `[places]`.
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


class Followed(NamedTuple):
    """The occurrences that the path to each node follows.

    Attributes:
        places: Places in the text of the tokens that may follow each node, newest first, `[nodes, SEARCHED]`.
        lengths: How many tokens agree there, likewise.
        found: How many there are, `[nodes]`.
    """

    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    found: NDArray[np.int64]


def allocate_followed(nodes: int) -> Followed:
    """Room for the occurrences of so many nodes."""
    places, lengths = (np.zeros((nodes, SEARCHED), dtype=np.int64) for _ in range(2))
    return Followed(places, lengths, np.zeros(nodes, dtype=np.int64))


class MatchArrays(NamedTuple):
    """One text, of which the first `length` tokens count; see `TextArrays` and `Followed`."""

    text: NDArray[np.int64]
    newest: NDArray[np.int32]
    earlier: NDArray[np.int32]
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    found: NDArray[np.int64]
    length: int


@inner
def matches_of(place: int, texts: TextArrays, followed: Followed) -> MatchArrays:
    """One text, and room for the occurrences that the nodes after it follow."""
    return MatchArrays(
        texts.tokens[place],
        texts.newest[place],
        texts.earlier[place],
        followed.places,
        followed.lengths,
        followed.found,
        texts.lengths[place],
    )


@compiled
def find_matches(context: NDArray[np.int64], size: int, node: int, matches: MatchArrays) -> int:
    """Note the occurrences of the longest indexed run that ends a context as those of `node`.

    Args:
        context: Its tokens, the last one first; `size` of them count.
        size: See there.
        node: Row of `places` and `lengths` that they are written to.
        matches: What to search.

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
        place = matches.newest[index, code & (BUCKETS - 1)]
        visited = 0
        while place >= 0 and visited < _VISITED and count < matches.places.shape[1]:
            visited += 1
            if place < matches.length:
                most = min(size, place)
                length = 0
                while length < most and context[length] == matches.text[place - 1 - length]:
                    length += 1
                if length >= run:
                    matches.places[node, count] = place
                    matches.lengths[node, count] = length
                    count += 1
            place = matches.earlier[index, place]
        if count > 0:
            break
    return count


@inner
def _follow(node: int, nodes: Nodes, matches: MatchArrays) -> int:
    """Note as those of `node` the occurrences of its parent that go on with its token; returns how many."""
    count = 0
    parent = nodes.parents[node]
    for match in range(matches.found[parent]):
        place = matches.places[parent, match]
        if matches.text[place] == nodes.tokens[node] and place + 1 < matches.length:
            matches.places[node, count] = place + 1
            matches.lengths[node, count] = min(matches.lengths[parent, match] + 1, LONGEST)
            count += 1
    return count


@inner
def _class_of(length: int) -> int:
    """Class of an agreement of so many tokens."""
    kind = 0
    while kind + 1 < len(MATCH_CLASSES) and length >= MATCH_CLASSES[kind + 1]:
        kind += 1
    return kind


@inner
def propose_matches(
    node: int,
    context: NDArray[np.int64],
    size: int,
    nodes: Nodes,
    proposals: Proposals,
    matches: MatchArrays,
    column: int,
) -> None:
    """Propose what followed where the text has been before: a feature for each class of agreement, 1 for the longest.

    Args:
        node: The node at the end of a path.
        context: Its last tokens, the very last one first; `size` of them count.
        size: See there.
        nodes: The tree.
        proposals: Get what may follow.
        matches: What to search. Occurrences that the path has followed so far go on; others are looked for when there
            are none left.
        column: The feature of the first class; those of the others, and half the number of further matches that a
            token follows, come behind it.
    """
    count = _follow(node, nodes, matches) if nodes.depths[node] > 0 else 0
    if count == 0:
        count = find_matches(context, size, node, matches)
    matches.found[node] = count
    for match in range(count):
        token = matches.text[matches.places[node, match]]
        longest = 0
        for other in range(match):
            if matches.text[matches.places[node, other]] == token:
                longest = max(longest, matches.lengths[node, other])
        row = proposal_of(token, node, proposals)
        if longest > 0:
            proposals.features[row, column + len(MATCH_CLASSES)] += 0.5
        if matches.lengths[node, match] > longest:
            if longest > 0:
                proposals.features[row, column + _class_of(longest)] = 0.0
            proposals.features[row, column + _class_of(matches.lengths[node, match])] = 1.0


@inner
def _chain_runs(place: int, begin: int, texts: TextArrays) -> None:
    """Chain the places of a text after `begin`, each of which follows a run of each length."""
    tokens, newest, earlier = texts.tokens[place], texts.newest[place], texts.earlier[place]
    for index in range(len(RUNS)):
        run = RUNS[index]
        for end in range(max(begin + 1, run), texts.lengths[place] + 1):
            code = 0
            for back in range(run):
                code = (code * _FACTOR + tokens[end - 1 - back] + 1) % _PRIME
            bucket = code & (BUCKETS - 1)
            earlier[index, end] = newest[index, bucket]
            newest[index, bucket] = end


@inner
def _append(place: int, tokens: NDArray[np.integer], begin: int, end: int, texts: TextArrays) -> None:
    """A text goes on with `tokens[begin:end]`; one that is too long by then keeps its last tokens."""
    length = first = texts.lengths[place]
    if length + end - begin > 2 * texts.reach:
        surplus = length + end - begin - texts.reach
        length, first = max(length - surplus, 0), 0
        for at in range(length):
            texts.tokens[place, at] = texts.tokens[place, surplus + at]
        begin = end - texts.reach + length
        texts.dropped[place] += surplus
        texts.newest[place, :, :] = -1
    for at in range(begin, end):
        texts.tokens[place, length + at - begin] = tokens[at]
    texts.lengths[place] = length + end - begin
    _chain_runs(place, first, texts)


@inner
def begin_text(place: int, tokens: NDArray[np.integer], end: int, texts: TextArrays) -> None:
    """A new text in a place, `tokens[:end]`; of a long one the last tokens."""
    texts.newest[place, :, :] = -1
    texts.lengths[place] = texts.dropped[place] = 0
    _append(place, tokens, 0, end, texts)


@inner
def follow_text(place: int, tokens: NDArray[np.integer], end: int, texts: TextArrays) -> None:
    """The text in a place goes on to be `tokens[:end]`."""
    _append(place, tokens, texts.dropped[place] + texts.lengths[place], end, texts)


@compiled
def extend_text(place: int, tokens: NDArray[np.integer], texts: TextArrays) -> None:
    """The text in a place goes on with these tokens."""
    _append(place, tokens, 0, len(tokens), texts)


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


class ContextMatches:
    """Texts in which earlier occurrences of the longest suffix of a context are found, newest first.

    The places that follow each run of 8, 4 and 2 tokens are chained, the newest first, as compressors do (LZ77). Adding
    a token takes constant time, amortised; a search visits at most 64 places a run length and returns 8. Each text
    keeps its last `memory` to `2 * memory` tokens; each takes 20 bytes, and the index 393 kB besides: 3 MB for the
    usual 65,536. The operating system fills pages when they are first written to.

    Args:
        memory: Tokens of each text that stay within reach, at least; 16 or more.
        before: Tokens that are searched as if they stood before each prompt.
        places: How many texts.

    Attributes:
        memory: As given.
        arrays: The texts.

    Raises:
        InvalidArgumentError: `memory` is too small.
    """

    def __init__(self, memory: int = REACH, before: Sequence[int] = (), places: int = 1) -> None:
        if memory < 16:
            raise InvalidArgumentError(f"memory={memory} is out of range; it must be at least 16 tokens")
        self.memory = memory
        self._before = np.array(before, dtype=np.int64)
        newest = np.empty((places, len(RUNS), BUCKETS), dtype=np.int32)
        lengths, dropped = np.zeros((2, places), dtype=np.int64)
        tokens, earlier = _allocate(places, 1)
        self.arrays = TextArrays(tokens, lengths, dropped, newest, earlier, memory)
        self._extend, self._precedes = TypedLoop(extend_text), TypedLoop(precedes)

    @property
    def text(self) -> NDArray[np.int64]:
        """The tokens within reach, of the text in the first place."""
        return self.arrays.tokens[0, : self.arrays.lengths[0]]

    def start(self, prompt: Sequence[int] | NDArray[np.int64]) -> None:
        """Begin a text in the first place."""
        self.forget(0)
        self.arrays.newest[0] = -1
        self.extend(np.concatenate([self._before, np.asarray(prompt, dtype=np.int64)]))

    def extend(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """The text in the first place goes on."""
        new = np.asarray(tokens, dtype=np.int64)
        self.make_room(int(self.arrays.lengths[0]) + len(new))
        self._extend(0, new, self.arrays)

    def is_before(self, place: int, tokens: NDArray[np.int32]) -> bool:
        """Whether the text in a place is what these tokens, `[tokens]`, begin with."""
        return bool(self._precedes(place, tokens, self.arrays))

    def forget(self, place: int) -> None:
        """There is no text in a place any more."""
        self.arrays.lengths[place] = self.arrays.dropped[place] = 0

    def make_room(self, longest: int) -> None:
        """Make room for texts of up to so many tokens."""
        old, most = self.arrays, 2 * self.memory
        if min(longest, most) < old.tokens.shape[1]:
            return
        tokens, earlier = _allocate(len(old.lengths), 1 + min(max(2 * longest, _LEAST_ROOM), most))
        for place in np.flatnonzero(old.lengths).tolist():
            end = old.lengths[place] + 1
            tokens[place, :end], earlier[place, :, :end] = old.tokens[place, :end], old.earlier[place, :, :end]
        self.arrays = old._replace(tokens=tokens, earlier=earlier)


def _allocate(places: int, room: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    return np.empty((places, room), dtype=np.int64), np.empty((places, len(RUNS), room), dtype=np.int32)
