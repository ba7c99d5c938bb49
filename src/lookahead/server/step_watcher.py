"""Watches the tree of each step of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.core.watching import StepWatcher, WatchedStep


@dataclass(frozen=True)
class StepTree:
    """What a step proposed, and what of it was accepted.

    Attributes:
        tokens: Token of each node; the first is the root.
        parents: Parent of each node, -1 for the root.
        path: The accepted nodes.
        sources: Source of each node below the root.
        probabilities: Of the path to each node below the root, as it was estimated; `None` where it was not.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    sources: list[str]
    probabilities: list[float | None]


class TreeWatcher:
    """A recorder (`lookahead.core.watching.Recorder`) that keeps the tree of the last step."""

    def __init__(self) -> None:
        self.tree: StepTree | None = None

    def begin(self, prompt: Sequence[int]) -> StepWatcher:
        """See `Recorder`."""
        return self._keep

    def _keep(self, step: WatchedStep) -> None:
        result, origins = step.result, step.explanation.origins
        tree, root = result.tree, result.tree.root
        parents = [-1, *(parent - root for parent in tree.parents[root + 1 :])]
        path = [node - root for node in result.path]
        likely = [None if origin.probability is None else round(origin.probability, 4) for origin in origins]
        self.tree = StepTree(tree.tokens[root:], parents, path, [origin.evidence[0] for origin in origins], likely)
