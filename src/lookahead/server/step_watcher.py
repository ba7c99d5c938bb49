"""Watches the tree of each step of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.source import TokenPaths


@dataclass(frozen=True)
class StepTree:
    """What a step proposed, and what of it was accepted.

    Attributes:
        tokens: Token of each node; the first is the root.
        parents: Parent of each node, -1 for the root.
        path: The accepted nodes.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]


class StepWatcher:
    """A source that proposes nothing, and keeps the tree of the last step."""

    name = "watcher"

    def __init__(self) -> None:
        self.tree: StepTree | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """See `lookahead.drafting.auto.source.Source`."""

    def propose(self) -> TokenPaths:
        """See `Source`."""
        return TokenPaths.chain([])

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        tree, root = result.tree, result.tree.root
        parents = [-1, *(parent - root for parent in tree.parents[root + 1 :])]
        self.tree = StepTree(tree.tokens[root:], parents, [node - root for node in result.path])
