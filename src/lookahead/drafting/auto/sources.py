"""Sources of `preset="auto"`: before each step they list tokens that may follow the text, with probabilities.

A predicted text is one, and a user may add others. What a source lists counts as often as it has come true lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lookahead.core.compiled import inner
from lookahead.core.protocols import StepResult
from lookahead.errors import InvalidArgumentError


@dataclass(frozen=True)
class TokenPaths:
    """Tokens that may follow the text, as a tree.

    Attributes:
        tokens: Token ids, `[tokens]`, the likeliest first among those with the same parent, which differ.
        parents: For each token the place in `tokens` of the one that it follows, which comes before it; -1 where it
            follows the text.
        probabilities: How likely each token is after its parent, `[tokens]`, above 0 and at most 1. What they are
            worth is seen from what comes true, so an estimate will do.
    """

    tokens: ArrayLike
    parents: ArrayLike
    probabilities: ArrayLike

    @classmethod
    def chain(cls, tokens: Sequence[int], probability: float = 0.9) -> TokenPaths:
        """One path, each token of which is as likely as the others."""
        return cls(tokens, range(-1, len(tokens) - 1), [probability] * len(tokens))


class Source(Protocol):
    """Proposes tokens that may follow one text. It cannot change the text, and counts as far as it comes true.

    A source may also have a method `permits(tokens, parents)`, which says for each node of a draft whether it can come
    true, as a grammar would know; see `permitted`. And it may have a method `certain()`, which gives the tokens that
    will be selected next whatever the model says. They are sent whether or not drafting pays. It is called first in
    each step; `propose` and `permits` are about what follows its tokens.
    """

    @property
    def name(self) -> str:
        """What traces call it: one word or a few, different from those of other sources."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self) -> TokenPaths:
        """What may follow the text now. Called before each step that has a draft."""

    def observe(self, result: StepResult) -> None:
        """The text goes on with `result.tokens`. Called after every step."""


def permitted(sources: Sequence[Any], tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nodes of a draft that can come true, for all that sources with a method `permits` know.

    It takes the tokens of a draft, `[nodes]`, and their parents, `[nodes]`: 0 for the text itself, 1 for the first
    node, and so on; a parent comes before its children. It returns for each node whether it can come true after its
    parent, `[nodes]` bool. What it says of nodes below one that cannot is of no account.

    Args:
        sources: Those that have the method.
        tokens, parents: As they get them.

    Returns:
        Numbers of nodes, like `parents`, with 0 before them.

    Raises:
        InvalidArgumentError: A source does not tell it of each node.
    """
    if not sources or not len(tokens):
        return np.arange(len(tokens) + 1)
    can = np.ones(len(tokens) + 1, dtype=bool)
    for source in sources:
        allowed = np.asarray(source.permits(tokens.tolist(), parents.tolist()), dtype=bool)
        if allowed.shape != tokens.shape:
            raise InvalidArgumentError(
                f"source {source.name!r}: permits told {allowed.shape} of {len(tokens)} nodes; tell it of each"
            )
        can[1:] &= allowed
    for node, parent in enumerate(parents.tolist(), 1):
        can[node] &= can[parent]
    return np.flatnonzero(can)


MOST_LISTED = 16
"""Most tokens that a source proposes after a node, and that are kept of what the model said after a rejected one."""

PRIOR = 4.0
"""Tokens of a source that are counted beforehand, as if they had come true as often as it said."""

KEPT = 0.95
"""What the record of a source, and that of the model's predictions in a text, keep of their weight with each step."""

LISTED = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),  # the token that it follows; for the first ones that of their source
        ("probability", np.float64),  # after its parent
    ]
)
"""A token of the paths that the sources of a text list."""


class ListedArrays(NamedTuple):
    """The proposals of a text's sources, and their outcomes.

    Attributes:
        tokens: The paths of all of them, `LISTED`s, a source's after another's. In front, a token for each source
            stands for the text.
        reached: Which of them each node of the search is, -1 if none, `[sources, nodes]`.
        record: How many selected tokens each source did list lately, and how many by its probabilities, `[sources, 2]`.
    """

    tokens: NDArray[Any]
    reached: NDArray[np.int64]
    record: NDArray[np.float64]


def with_paths(listed: ListedArrays, paths: Sequence[TokenPaths]) -> ListedArrays:
    """The same with the paths of each source instead of those before."""
    roots = np.zeros(len(paths), dtype=LISTED)
    roots["parent"] = -1  # they follow nothing
    parts, begin = [roots], len(paths)
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
    """The token of a source's paths that a node is, the one that stands for the text for the root; -1 if it is none."""
    tokens, reached, _ = listed
    place = source
    if node > 0:
        one = nodes[node]
        before, place = reached[source, one["parent"]], -1
        for number in range(before + 1, len(tokens) if before >= 0 else 0):
            other = tokens[number]
            if other["parent"] == before and other["token"] == one["token"]:
                place = number
                break
    reached[source, node] = place
    return place
