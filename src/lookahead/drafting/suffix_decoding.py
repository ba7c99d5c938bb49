"""Suffix decoding (arXiv 2411.04975, section 3): draft the most frequent continuations of the text's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, Origin


class _Guess(NamedTuple):
    """Draft from one suffix: tokens, indices of their parents (-1 for the root), and relative frequencies."""

    tokens: list[int]
    parents: list[int]
    likely: list[float]


class SuffixDecodingDrafter:
    """Drafter of the likeliest tree by counts of what followed each suffix of the text before.

    A suffix of m tokens drafts at most `factor` * m + `offset` tokens, best-first by relative frequency. The suffix
    with the largest sum of probabilities drafts. The authors count in a suffix tree of prompt and output; here lists
    of occurrences give the same counts. Their second tree, of earlier outputs, is left out.

    Args:
        budget: Nodes of a step, the root included. At least 1.
        factor: Most drafted tokens for each matching token.
        offset: Most drafted tokens besides.
        min_probability: Least relative frequency of a drafted path.
        depth: Most tokens of a suffix with its continuation.
        chains: Draft only the most frequent token after each token, for models that cannot run trees.
    """

    top_k = 0

    def __init__(
        self, budget: int, factor: float, offset: float, min_probability: float, depth: int, chains: bool = False
    ) -> None:
        self.budget, self.depth, self.min_probability = budget, depth, min_probability
        self._factor, self._offset, self._chains = factor, offset, chains
        self._drafted: dict[int | None, float] = {}

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a text with `prompt`, and forget the text before."""
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = {}  # for each token the indices after it
        self._add(prompt)

    def propose(self, tree: TokenTree) -> None:
        """Add the draft of the best suffix."""
        text, guess, best = self._text, _Guess([], [], []), 0.0
        places = self._ends[text[-1]][:-1]  # without the end of the text itself
        for length in range(1, min(len(text), self.depth)):
            if not places:
                break
            longer = [place for place in places if place > length and text[place - length - 1] == text[-length - 1]]
            # With the same occurrences the longer suffix drafts at least as much, unless its depth cuts the draft.
            if len(longer) < len(places) or self.depth - length < self.budget:
                max_tokens = max(min(self.budget - 1, int(length * self._factor + self._offset + 1e-6)), 0)
                other = self._guess(places, max_tokens, min(self.depth - length, tree.room))
                if sum(other.likely) >= best:
                    guess, best = other, sum(other.likely)
            places = longer
        nodes: list[int | None] = [tree.root]
        for token, parent in zip(guess.tokens, guess.parents, strict=True):
            above = nodes[parent + 1]
            path = [] if above is None else tree.add_candidates([token], above)
            nodes.append(path[0] if path else None)  # `None`: the model does not know the token
        self._drafted = dict(zip(nodes[1:], guess.likely, strict=True))

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the relative frequency of each node as its probability."""
        nodes = range(tree.root + 1, len(tree))
        return Explanation([Origin(("suffix",), self._drafted.get(node)) for node in nodes], len(self._text))

    def observe(self, result: StepResult) -> None:
        """Append the new tokens to the text."""
        self._add(result.tokens)

    def statistics(self) -> dict[str, Any]:
        """Return the number of stored tokens."""
        return {"entries": len(self._text)}

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._ends.setdefault(token, []).append(len(self._text))

    def _guess(self, places: list[int], max_tokens: int, levels: int) -> _Guess:
        """Draft up to `max_tokens` tokens, at most `levels` deep, after occurrences that end at `places`."""
        guess, order = _Guess([], [], []), count()
        queue: list[tuple[float, int, int, list[int], int]] = []  # minus the probability, order, parent, places, level

        def extend(probability: float, occurrences: int, parent: int, places: list[int], level: int) -> None:
            followers: dict[int, list[int]] = {}
            for place in places:
                if place < len(self._text):
                    followers.setdefault(self._text[place], []).append(place + 1)
            groups = sorted(followers.values(), key=len, reverse=True)
            for group in groups[: 1 if self._chains else None]:
                likely = probability * len(group) / occurrences
                if likely >= self.min_probability:
                    heappush(queue, (-likely, next(order), parent, group, level))

        extend(1.0, len(places) + 1, -1, places, 1)
        while queue and len(guess.tokens) < max_tokens:
            negative, _, parent, group, level = heappop(queue)
            guess.tokens.append(self._text[group[0] - 1])
            guess.parents.append(parent)
            guess.likely.append(-negative)
            if level < levels:
                extend(-negative, len(group), len(guess.tokens) - 1, group, level + 1)
        return guess
