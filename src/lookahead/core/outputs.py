"""What a forward pass says of each node of a tree, and what a step did with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.core.shaping import Shaping
from lookahead.core.token_tree import TokenTree


class NodeOutputs(Protocol):
    """What a forward pass gave for the tree of one sequence."""

    @property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token after each node, `[nodes]`; -1 where nothing was read."""

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """The likeliest tokens after each node, likeliest first, `[nodes, top_k]`; -1 where nothing was read."""

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """Their probabilities, `[nodes, top_k]`; 0 where nothing was read."""

    def logits_after(self, node: int) -> Any:
        """Logits of the token after `node`, `[1, vocabulary]` float32, in the backend's own kind of array."""


@dataclass(frozen=True)
class StepResult:
    """What one step showed about one sequence.

    Attributes:
        tree: The tree that was sent.
        predicted: `predictions`, or a function that finds them: a drafter that rests has no use for them.
        path: The accepted candidate nodes, from below the root downwards.
        tokens: The tokens the step added to the text: those of `path`, and the one selected after it.
        top_ids: For each node the model's likeliest next tokens, likeliest first, `[nodes, top_k]` int64; -1 where
            the prediction was not read. `top_k` is the largest of the drafters of the batch.
        top_probabilities: Their probabilities (softmax of the unprocessed logits), `[nodes, top_k]` float32; 0
            where the prediction was not read.
        shaping: What sampling makes of these probabilities; `None` where the likeliest tokens are selected.
    """

    tree: TokenTree
    predicted: NDArray[np.int64] | Callable[[], NDArray[np.int64]]
    path: list[int]
    tokens: list[int]
    top_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    top_probabilities: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    shaping: Shaping | None = None

    @property
    def predictions(self) -> NDArray[np.int64]:
        """For each node of the tree the model's likeliest next token after it (greedy, from the unprocessed logits),
        `[nodes]` int64; -1 where the prediction was not read."""
        return self.predicted() if callable(self.predicted) else self.predicted

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, instead of selecting the likeliest."""
        return self.shaping is not None

    def shaped(self) -> StepResult:
        """The same with the probabilities that tokens are sampled with; -1 and 0 for those that are not sampled."""
        if self.shaping is None or not self.shaping.changes:
            return self
        ids, probabilities = self.shaping.apply(self.top_ids, self.top_probabilities)
        return replace(self, top_ids=ids, top_probabilities=probabilities)

    @property
    def certain_tokens(self) -> int:
        """How many of `tokens` were accepted of what the tree has from `TokenTree.add_certain`."""
        return sum(node <= self.tree.root + self.tree.certain for node in self.path)

    def beyond(self, certain: int) -> StepResult:
        """The same step, with its first `certain` tokens taken as decided before it; see `TokenTree.beyond`."""
        if not certain:
            return self
        return replace(self, tree=self.tree.beyond(certain), path=self.path[certain:], tokens=self.tokens[certain:])

    @property
    def selected_after(self) -> list[int]:
        """The nodes after which `tokens` were selected: the root, and those of the path."""
        return [self.tree.root, *self.path][: len(self.tokens)]
