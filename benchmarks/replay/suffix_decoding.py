"""Suffix decoding (arXiv 2411.04975) as published: the most frequent continuations of all suffixes seen before.

The paper keeps a suffix tree of the request, prompt and output so far, and one of the outputs of earlier requests and
of this one. For each length of suffix that occurs in a tree, the continuations are followed by their frequency, at most
`factor` times as many tokens as agree, each with a probability of at least `least`; a continuation's probability is its
share of the occurrences, that of the text's own end, which nothing follows yet, among them. The draft whose
probabilities have the largest sum is sent; of equal ones that of the longest suffix, and that of the request.

Instead of a tree there is the text itself, with the places of each token in a chain: the nodes of the tree are sets of
places. The drafts are the same, if those of equal frequency are taken in the order of their latest occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled
from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree

_END = -1
"""Stands between texts."""

DEPTH = 64
"""Tokens of suffix and continuation together, at most."""


class SuffixText:
    """Texts one after another, with the places of each token chained, the latest first."""

    def __init__(self) -> None:
        self.tokens = np.zeros(1024, dtype=np.int64)
        self.before = np.zeros(1024, dtype=np.int64)
        self.length = 0
        self._latest: dict[int, int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """The last text goes on."""
        end = self.length + len(tokens)
        if end > len(self.tokens):
            room = 2 * end
            self.tokens, self.before = np.resize(self.tokens, room), np.resize(self.before, room)
        for place, token in enumerate(tokens, start=self.length):
            self.tokens[place] = token
            self.before[place] = self._latest.get(token, -1)
            self._latest[token] = place
        self.length = end

    def latest(self, token: int) -> int:
        """The latest place of a token, -1 if there is none."""
        return self._latest.get(token, -1)

    @property
    def text(self) -> NDArray[np.int64]:
        """All of them."""
        return self.tokens[: self.length]

    def begin(self) -> None:
        """Another text begins."""
        self.extend([_END])


class Draft:
    """A draft: tokens, the place of each one's parent in it (-1: the root), and the sum of their probabilities."""

    def __init__(self, tokens: list[int], parents: list[int], score: float) -> None:
        self.tokens, self.parents, self.score = tokens, parents, score


def speculate(
    known: SuffixText,
    context: NDArray[np.int64],
    most: int,
    factor: float,
    least: float,
    branches: bool,
    depth: int = DEPTH,
) -> Draft:
    """The best draft of all suffixes of a context, but for the whole of it.

    Args:
        known: Where they are looked for.
        context: The text so far.
        most: Tokens drafted at most.
        factor: Tokens drafted for each token of the suffix.
        least: Least probability of a token.
        branches: Draft a tree, instead of a path.
        depth: Tokens of suffix and continuation together.
    """
    context = context[-depth:]
    first = known.latest(int(context[-1]))
    if first < 0:
        return Draft([], [], 0.0)
    room = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64), np.zeros((2, most), dtype=np.int64)
    texts = known.tokens, known.before, context
    arguments: list[Any] = [*texts, first, known.length, most, factor, least, branches, depth, *room]
    size, score = _speculate(*arguments)
    return Draft(room[2][0, :size].tolist(), room[2][1, :size].tolist(), score)


@compiled
def _agreements(tokens: Any, before: Any, context: Any, place: int, depth: int, places: Any, agreed: Any) -> int:
    """Write the places after all occurrences of the last token, the latest first, and how many tokens agree there.

    `place` is the first of these occurrences.
    """
    count = 0
    most = min(depth, len(context) - 1)
    while place >= 0:
        size = 0
        while size < most and size <= place and tokens[place - size] == context[len(context) - 1 - size]:
            size += 1
        places[count] = place + 1
        agreed[count] = size
        count += 1
        place = before[place]
    return count


@partial(compiled, makes_arrays=True)
def _grow(
    tokens: Any,
    length: int,
    alive: Any,
    most: int,
    depth: int,
    least: float,
    branches: bool,
    drafted: Any,
    parents: Any,
) -> Any:
    """Write the most probable continuations of the places `alive`; returns how many, and their probabilities' sum.

    A continuation that waits is a token, and the places after its occurrences: those from `begins` to `ends` in `pool`.
    """
    size = len(alive) * (most + 1) + 1
    pool = np.empty(size, dtype=np.int64)
    wait_tokens, wait_parents = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    levels = np.empty(size, dtype=np.int64)
    begins, ends = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    probabilities = np.empty(size, dtype=np.float64)
    taken = np.zeros(size, dtype=np.bool_)
    waiting, used = 0, len(alive)
    pool[:used] = alive
    begin, end, level, probability, parent = 0, used, 0, 1.0, -1
    found, score = 0, 0.0
    while found < most:
        if level < depth:
            first = waiting
            mark = used
            for place in range(begin, end):
                at = pool[place]
                if at >= length or tokens[at] < 0:
                    continue
                known = first
                while known < waiting and wait_tokens[known] != tokens[at]:
                    known += 1
                if known == waiting:
                    wait_tokens[waiting] = tokens[at]
                    ends[waiting] = 0
                    waiting += 1
                ends[known] += 1
            heaviest = first
            for known in range(first, waiting):
                if ends[known] > ends[heaviest]:
                    heaviest = known
            if not branches and waiting > first:
                wait_tokens[first], ends[first] = wait_tokens[heaviest], ends[heaviest]
                waiting = first + 1
            for known in range(first, waiting):
                begins[known] = used
                probabilities[known] = probability * ends[known] / (end - begin)
                for place in range(begin, end):
                    at = pool[place]
                    if at < length and tokens[at] == wait_tokens[known]:
                        pool[used] = at + 1
                        used += 1
                ends[known] = used
                wait_parents[known], levels[known], taken[known] = parent, level + 1, False
            if used == mark and not branches:
                break
        chosen = -1
        for known in range(waiting):
            is_open = not taken[known] and probabilities[known] >= least
            if is_open and (chosen < 0 or probabilities[known] > probabilities[chosen]):
                chosen = known
        if chosen < 0:
            break
        taken[chosen] = True
        drafted[found], parents[found] = wait_tokens[chosen], wait_parents[chosen]
        begin, end, level = begins[chosen], ends[chosen], levels[chosen]
        probability, parent = probabilities[chosen], found
        score += probability
        found += 1
    return found, score


@partial(compiled, makes_arrays=True)
def _speculate(
    tokens: Any,
    before: Any,
    context: Any,
    first: int,
    length: int,
    most: int,
    factor: float,
    least: float,
    branches: bool,
    depth: int,
    drafted: Any,
    parents: Any,
    best: Any,
) -> Any:
    """Write the best draft to `best`, tokens and parents; returns how many tokens, and their score."""
    places, agreed = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    count = _agreements(tokens, before, context, first, depth, places, agreed)
    longest = 0
    for each in range(count):
        if places[each] < length:
            longest = max(longest, agreed[each])
    alive = np.empty(count, dtype=np.int64)
    best_size, best_score = 0, 0.0
    for size in range(1, longest + 1):
        total = 0
        for each in range(count):
            if agreed[each] >= size:
                alive[total] = places[each]
                total += 1
        limit = min(most, int(size * factor + 1e-6))
        found, score = _grow(tokens, length, alive[:total], limit, depth - size, least, branches, drafted, parents)
        if found > 0 and score >= best_score:
            best_size, best_score = found, score
            for each in range(found):
                best[0, each], best[1, each] = drafted[each], parents[each]
    return best_size, best_score


class SuffixDecoding:
    """The method as a drafter (`Drafter`).

    Args:
        most: Tokens drafted at most.
        outputs: The outputs of the requests before, which this one joins; none if not given.
        branches: Draft trees, instead of paths.
        factor, least: See `speculate`.
    """

    top_k = 0

    def __init__(
        self,
        most: int,
        outputs: SuffixText | None = None,
        branches: bool = False,
        factor: float = 1.0,
        least: float = 0.1,
    ) -> None:
        self._settings = most, factor, least, branches
        self._own, self._outputs = SuffixText(), outputs

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._own = SuffixText()
        self._own.extend(prompt)
        if self._outputs is not None:
            self._outputs.begin()

    def propose(self, tree: TokenTree) -> None:
        """See `Drafter`."""
        context = self._own.text
        draft = speculate(self._own, context, *self._settings)
        if self._outputs is not None:
            other = speculate(self._outputs, context, *self._settings)
            draft = other if other.score > draft.score else draft
        nodes: list[int] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            under = tree.root if parent < 0 else nodes[parent]
            added = tree.add_candidates([token], under) if under >= 0 else []
            nodes += added or [-1]  # there is no room for what is deeper

    def observe(self, result: StepResult) -> None:
        """See `Drafter`."""
        self._own.extend(result.tokens)
        if self._outputs is not None:
            self._outputs.extend(result.tokens)

    def statistics(self) -> dict[str, Any]:
        """See `Drafter`."""
        return {}
