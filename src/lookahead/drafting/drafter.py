"""What every drafting method has in common: it proposes, and it learns from what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """

    tree: TokenTree
    predictions: NDArray[np.int64]
    path: list[int]
    tokens: list[int]


class Drafter(Protocol):
    """Proposes tokens for one sequence. Whatever it proposes, the text stays the same; only the steps get fewer."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self, tree: TokenTree) -> None:
        """Add candidate and window nodes to the tree of the coming step, likeliest path first."""

    def observe(self, result: StepResult) -> None:
        """Learn from the step. Called after every step, also after one for which nothing was asked (a long prefill)."""
