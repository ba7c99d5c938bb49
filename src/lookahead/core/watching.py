"""Watching the steps of a sequence: what was sent, where each node came from, and what became of it.

Nothing here runs where nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lookahead.core.protocols import StepResult
from lookahead.core.statistics import Seconds, StepRecord
from lookahead.core.token_tree import NodeKind, TokenTree

UNNAMED = "draft"
"""Source of a node whose drafter says nothing about it."""

WINDOW = "lookahead window"

CERTAIN = "certain"
"""Source of a node that is sent because what is accepted of its like does not depend on the model."""


@dataclass(frozen=True)
class Origin:
    """Where a node comes from.

    Attributes:
        evidence: Everything that named its token; the first is its source, the one that knew the longest context. What
            stands before a comma is the kind of source.
        probability: How likely its drafter took the path to the node to be accepted, if it says so.
    """

    evidence: tuple[str, ...]
    probability: float | None = None


@dataclass(frozen=True)
class Explanation:
    """What a drafter says about what it proposed.

    Attributes:
        origins: Of each node below the root, in the order of the nodes.
        entries: Entries of what it draws on, a memory or a pool, when it proposed; `None` if it has none.
    """

    origins: Sequence[Origin] = ()
    entries: int | None = None


@runtime_checkable
class ExplainsDrafts(Protocol):
    """A drafter that can say where its nodes come from. All of this library do; one of a user's own need not."""

    def explain(self, tree: TokenTree) -> Explanation:
        """About `tree`, which it was shown last. Called between `propose` and `observe`, if anybody watches."""


@dataclass(frozen=True)
class WatchedStep:
    """One step of a sequence.

    Attributes:
        result: The tree, what the model said of its nodes, and what was accepted.
        record: What the step came to.
        explanation: Where each node below the root came from.
        seconds: Time of each part of the step, of all rows of the batch together. Watching is not counted.
    """

    result: StepResult
    record: StepRecord
    explanation: Explanation
    seconds: Seconds


StepWatcher = Callable[[WatchedStep], None]


class Recorder(Protocol):
    """Watches sequences; `lookahead.Trace` does."""

    def begin(self, prompt: Sequence[int]) -> StepWatcher:
        """Begin a sequence with this prompt; returns the function to call after each of its steps."""


def explain(drafter: Any, tree: TokenTree) -> Explanation:
    """Where the nodes of a tree come from, as far as its drafter says."""
    explanation = drafter.explain(tree) if isinstance(drafter, ExplainsDrafts) else Explanation()
    below = range(tree.root + 1, len(tree))
    if len(explanation.origins) == len(below):
        return explanation
    return Explanation([_unexplained(tree, node) for node in below], explanation.entries)


def _unexplained(tree: TokenTree, node: int) -> Origin:
    return Origin((WINDOW if tree.kinds[node] is NodeKind.WINDOW else UNNAMED,))
