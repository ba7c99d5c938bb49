"""What every drafting method has in common: it proposes, and it learns from what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.token_tree import TokenTree


@dataclass(frozen=True)
class StepResult:
    """What one step showed about one sequence.

    Attributes:
        tree: The tree that was sent.
        predictions: For each node of the tree the model's likeliest next token after it (greedy, from the
            unprocessed logits), `[nodes]` int64; -1 where the prediction was not read.
        path: The accepted candidate nodes, from below the root downwards.
        tokens: The tokens the step added to the text: those of `path`, and the one the target named after it.
        top_ids: For each node the model's likeliest next tokens, likeliest first, `[nodes, top_k]` int64; -1 where
            the prediction was not read. `top_k` is the largest that a drafter of the batch asked for.
        top_probabilities: Their probabilities (softmax of the unprocessed logits), `[nodes, top_k]` float32; 0
            where the prediction was not read.
    """

    tree: TokenTree
    predictions: NDArray[np.int64]
    path: list[int]
    tokens: list[int]
    top_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    top_probabilities: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))


class Drafter(Protocol):
    """Proposes tokens for one sequence. Whatever it proposes, the text stays the same; only the steps get fewer."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; 0 if the likeliest alone will do."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self, tree: TokenTree) -> None:
        """Add candidate and window nodes to the tree of the coming step, likeliest path first."""

    def observe(self, result: StepResult) -> None:
        """Learn from the step. Called after every step, also after one for which nothing was asked (a long prefill)."""

    def statistics(self) -> dict[str, Any]:
        """What the drafter draws from, as plain numbers and lists: how much it holds and how often that was of use."""
