"""Sources of `preset="auto"`: before each step they list possible next tokens, with probabilities.

Predicted output is one source, and users may add others. The weight of a source follows its recent hit rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lookahead.core.compiled import inner
from lookahead.core.results import StepResult
from lookahead.errors import InvalidArgumentError


@dataclass(frozen=True)
class TokenPaths:
    """Possible continuations of the text, as a tree.

    Attributes:
        tokens: Token ids, `[tokens]`, likeliest first among siblings, which must differ.
        parents: Index in `tokens` of each token's parent, which must be smaller than its own; -1 for the end of the
            text.
        probabilities: Probability of each token after its parent, `[tokens]`, above 0 and at most 1. An estimate is
            enough, because it is corrected by the source's hit rate.
    """

    tokens: ArrayLike
    parents: ArrayLike
    probabilities: ArrayLike

    @classmethod
    def chain(cls, tokens: Sequence[int], probability: float = 0.9) -> TokenPaths:
        """Return one path with the same probability for each token."""
        return cls(tokens, range(-1, len(tokens) - 1), [probability] * len(tokens))


class Source(Protocol):
    """Source of possible next tokens of one text. It cannot change the text, and counts by its hit rate.

    A source may have a method `permits(tokens, parents)`, which returns for each node of a draft whether it is
    possible, as a grammar knows; see `permitted`. It may also have a method `certain()`, which returns the tokens that
    will be selected next whatever the model predicts. They are sent whether or not drafting rests. `certain` is called
    first in each step; `propose` and `permits` are about the text after its tokens.
    """

    @property
    def name(self) -> str:
        """Name in traces: a word or a few, different from other sources."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self) -> TokenPaths:
        """Return possible continuations of the text. Called before each step with a draft."""

    def observe(self, result: StepResult) -> None:
        """Learn from a step, which extended the text by `result.tokens`. Called after every step."""


NEARBY = 64
"""Tokens proposed at each index of the predicted text, and tokens searched for the index after a change."""

PLACES = 4
"""Maximum number of indices where the text may continue."""


class PredictedText:
    """Source (`Source`) of the continuation of a predicted output, for example a file before an edit.

    While the output follows the predicted text, there is one index where it continues. After a deviating token there
    are several: the token was replaced, was inserted, or tokens were deleted. The first index that matches is the next
    one.

    Args:
        tokens: Token ids of the predicted text.

    Attributes:
        tokens: Token ids of the predicted text.
        accepted: Output tokens that matched the predicted text.
    """

    name = "predicted text"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._places = [0]
        self._changed = 0  # tokens since the output deviated from the predicted text
        self.accepted = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence at the start of the predicted text."""
        self._places = [0]
        self._changed = 0
        self.accepted = 0

    def propose(self) -> TokenPaths:
        """Return the continuations at each index where the text may continue."""
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for place in self._places:
            node = -1
            for token in self.tokens[place : place + NEARBY]:
                if (node, token) not in children:
                    children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node, token]
        return TokenPaths(tokens, parents, [1.0] * len(tokens))

    def observe(self, result: StepResult) -> None:
        """Follow the new tokens in the predicted text."""
        for token in result.tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        for place in self._places:
            if place < len(self.tokens) and self.tokens[place] == token:
                self._places = [place + 1]
                self._changed = 0
                self.accepted += 1
                return
        self._changed += 1
        left = self._places[-1]  # index where the output deviated from the predicted text
        behind = [
            place + 1
            for place in range(left, min(left + NEARBY, len(self.tokens)))
            if self.tokens[place] == token and place != left
        ]
        self._places = [*dict.fromkeys([left + self._changed, *behind[: PLACES - 2]]), left]


def permitted(sources: Sequence[Any], tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nodes of a draft that are possible according to all sources with a method `permits`.

    `permits` accepts the tokens of a draft, `[nodes]`, and their parents, `[nodes]`: 0 for the end of the text, 1 for
    the first node, and so on; a parent precedes its children. It returns whether each node is possible after its
    parent, `[nodes]` bool. Values below an impossible node are ignored.

    Args:
        sources: Sources with the method.
        tokens: Tokens of the draft.
        parents: Their parents.

    Returns:
        Node numbers in the same form as `parents`, starting with 0.

    Raises:
        InvalidArgumentError: `permits` of a source returned another shape than `[nodes]`.
    """
    if not sources or not len(tokens):
        return np.arange(len(tokens) + 1)
    can = np.ones(len(tokens) + 1, dtype=bool)
    for source in sources:
        allowed = np.asarray(source.permits(tokens.tolist(), parents.tolist()), dtype=bool)
        if allowed.shape != tokens.shape:
            raise InvalidArgumentError(
                f"source {source.name!r}: permits() returned shape {allowed.shape}, expected {tokens.shape}"
            )
        can[1:] &= allowed
    for node, parent in enumerate(parents.tolist(), 1):
        can[node] &= can[parent]
    return np.flatnonzero(can)


MOST_LISTED = 16
"""Maximum number of tokens that a source proposes after a node, and of guesses kept after a rejected token."""

PRIOR = 4.0
"""Prior count of a source's hits, in tokens; the prior trusts its probabilities."""

DECAY = 0.95
"""Fraction of the hit records of sources and of predictions that is kept with each step or token."""

LISTED = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),  # index of the parent; the root of the source for its first tokens
        ("probability", np.float64),  # probability after its parent
    ]
)
"""A token of the paths that a text's sources list."""


class ListedArrays(NamedTuple):
    """Proposals of a text's sources, and their hit records.

    Attributes:
        tokens: Roots, one per source, then the paths of all sources, one after another, `LISTED`s.
        reached: Index in `tokens` of each node of the search, -1 for none, `[sources, nodes]`.
        record: Decayed number of selected tokens that each source listed, and their expected number, `[sources, 2]`.
    """

    tokens: NDArray[Any]
    reached: NDArray[np.int64]
    record: NDArray[np.float64]


def with_paths(listed: ListedArrays, paths: Sequence[TokenPaths]) -> ListedArrays:
    """Return the arrays with new paths of each source."""
    roots = np.zeros(len(paths), dtype=LISTED)
    roots["parent"] = -1  # roots have no parent
    parts = [roots]
    begin = len(paths)
    for source, one in enumerate(paths):
        parents = np.asarray(one.parents)
        part = np.zeros(len(parents), dtype=LISTED)
        part["token"], part["probability"] = one.tokens, one.probabilities
        part["parent"] = np.where(parents < 0, source, parents + begin)
        parts.append(part)
        begin += len(part)
    return listed._replace(tokens=np.concatenate(parts))


@inner
def follow_listed(source: int, node: int, nodes: NDArray[Any], listed: ListedArrays) -> int:
    """Return the index of a node in a source's paths, or the source's root for the root of the tree; -1 for none."""
    tokens, reached, _ = listed
    place = source
    if node > 0:
        one = nodes[node]
        before = reached[source, one["parent"]]
        place = -1
        for number in range(before + 1, len(tokens) if before >= 0 else 0):
            other = tokens[number]
            if other["parent"] == before and other["token"] == one["token"]:
                place = number
                break
    reached[source, node] = place
    return place
