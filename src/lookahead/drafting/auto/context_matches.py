"""Where the text has been before: earlier occurrences of its last tokens, and what followed them.

Prompt lookup and the paper's "prompt as reference" draft from this. Text that copies (code, quotations, answers about
a given text) is accepted many tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import IS_COMPILED, TypedLoop, compiled, inner, loop_arrays, loop_tuple
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

BUCKETS = 1 << 15
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


class MatchArrays(NamedTuple):
    """The arrays of `ContextMatches`, and the occurrences that the path to each node follows.

    Attributes:
        text: The text, of which the first `length` tokens count.
        newest: For each run length and bucket the last place that follows a run of it, -1 if there is none.
        earlier: For each run length and place the one before it in its bucket.
        places: Places of the tokens that may follow each node, newest first, `[nodes, SEARCHED]`.
        lengths: How many tokens agree there, likewise.
        found: How many there are, `[nodes]`.
        length: See `text`.
    """

    text: NDArray[np.int64]
    newest: NDArray[np.int32]
    earlier: NDArray[np.int32]
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    found: NDArray[np.int64]
    length: int


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


@compiled
def chain_runs(
    text: NDArray[np.int64], begin: int, end: int, newest: NDArray[np.int32], earlier: NDArray[np.int32]
) -> None:
    """Chain the places after `begin`, up to and with `end`, each of which follows a run of each length."""
    for index in range(len(RUNS)):
        run = RUNS[index]
        for place in range(max(begin + 1, run), end + 1):
            code = 0
            for back in range(run):
                code = (code * _FACTOR + text[place - 1 - back] + 1) % _PRIME
            bucket = code & (BUCKETS - 1)
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
        before: Tokens that are searched as if they stood before each prompt.

    Raises:
        InvalidArgumentError: `memory` is too small.
    """

    def __init__(self, memory: int = 1 << 16, before: Sequence[int] = ()) -> None:
        if memory < 16:
            raise InvalidArgumentError(f"memory={memory} is out of range; it must be at least 16 tokens")
        self.memory = memory
        self._before = np.array(before, dtype=np.int64)
        self.tokens = np.zeros(0, dtype=np.int64)
        self.length = 0
        self.newest = np.full((len(RUNS), BUCKETS), -1, dtype=np.int32)
        self.earlier = np.zeros((len(RUNS), 1), dtype=np.int32)
        self._context = np.zeros(LONGEST, dtype=np.int64)
        self._places, self._lengths = (np.zeros((1, SEARCHED), dtype=np.int64) for _ in range(2))
        self._found = np.zeros(1, dtype=np.int64)
        self._chain_runs = TypedLoop(chain_runs)

    @property
    def text(self) -> NDArray[np.int64]:
        """The tokens within reach."""
        return self.tokens[: self.length]

    def start(self, prompt: Sequence[int] | NDArray[np.int64]) -> None:
        """Begin a text."""
        self._restart(np.concatenate([self._before, np.asarray(prompt, dtype=np.int64)]))

    def _restart(self, text: NDArray[np.int64]) -> None:
        self.length = 0
        self.newest.fill(-1)
        self.extend(text)

    def extend(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """The text goes on."""
        new = np.asarray(tokens, dtype=np.int64)
        if self.length + len(new) > 2 * self.memory:
            kept = np.concatenate([self.text, new])[-self.memory :]
            self._restart(kept)
            return
        begin, self.length = self.length, self.length + len(new)
        self._make_room()
        self.tokens[begin : self.length] = new
        if IS_COMPILED or len(new) <= _FEW:
            text, newest, earlier = loop_arrays(self.tokens, self.newest, self.earlier)
            self._chain_runs(text, begin, self.length, newest, earlier)
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
        arrays = self.arrays(0)
        (told,) = loop_arrays(self._context)
        count = find_matches(told, size, 0, loop_tuple(arrays))
        rows = arrays.places[0, :count].tolist(), arrays.lengths[0, :count].tolist()
        found = [Match(place, length) for place, length in zip(*rows, strict=True)]
        return sorted(found, key=lambda match: -match.length)

    def arrays(self, nodes: int) -> MatchArrays:
        """What compiled loops search, with room for the occurrences that the paths to so many nodes follow."""
        if nodes > len(self._found):
            self._places, self._lengths = (np.zeros((nodes, SEARCHED), dtype=np.int64) for _ in range(2))
            self._found = np.zeros(nodes, dtype=np.int64)
        own = self._places, self._lengths, self._found
        return MatchArrays(self.tokens, self.newest, self.earlier, *own, self.length)

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
        buckets = codes & (BUCKETS - 1)
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_places = buckets[order], places[order]
        begins = np.flatnonzero(np.diff(sorted_buckets, prepend=-1))
        before = np.concatenate([[-1], sorted_places[:-1]])
        before[begins] = self.newest[index, sorted_buckets[begins]]
        self.earlier[index, sorted_places] = before
        ends = np.concatenate([begins[1:], [len(places)]]) - 1
        self.newest[index, sorted_buckets[ends]] = sorted_places[ends]
