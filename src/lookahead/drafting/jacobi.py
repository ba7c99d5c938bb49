"""Jacobi decoding (Algorithm 1): guess a block of tokens at once, and iterate until it is stable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, Origin


class JacobiBlockDrafter:
    """Drafter of one chain: the guesses for the unconfirmed positions of a block.

    Each step is one Jacobi iteration: the model predicts a new token for every position of the block, given the
    guesses before it. The walk accepts the confirmed prefix at once; the remaining positions are guessed again. A block
    ends when it is fully confirmed, or after `max_iterations` steps; then a new one starts with random guesses.

    Args:
        block_size: m, positions guessed at once.
        max_iterations: Steps after which a block is given up.
        seed: Seed for choosing the initial prompt tokens of a block.
    """

    top_k = 0

    def __init__(self, block_size: int, max_iterations: int, seed: int) -> None:
        self.block_size = block_size
        self.max_iterations = max_iterations
        self._seed = seed
        self._prompt: list[int] = []
        self._guesses: list[int] = []  # one for each open position of the block
        self._iterations = 0
        self._chain: list[int] | None = None  # this step's nodes

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence with a block of random tokens of `prompt`."""
        self._rng = np.random.default_rng(self._seed)
        self._prompt = list(prompt)
        self._chain = None
        self._begin_block()

    def propose(self, tree: TokenTree) -> None:
        """Add the guesses as one chain under the root."""
        self._chain = [tree.root, *tree.add_candidates(self._guesses)]

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the block as the source of all nodes."""
        return Explanation([Origin(("Jacobi block",))] * (len(tree) - tree.root - 1))

    def observe(self, result: StepResult) -> None:
        """Update the guesses for open positions; start a new block when there are none."""
        if self._chain is None:
            return
        self._iterations += 1
        # The prediction after a node is the new guess for the next position; confirmed positions are no longer
        # open. The last node predicts a token beyond the block, and the walk may have accepted it.
        new = [int(result.predictions[node]) for node in self._chain[:-1]]
        unsent = self._guesses[len(new) :]
        self._guesses = (new + unsent)[len(result.tokens) :]
        self._chain = None
        if not self._guesses or self._iterations >= self.max_iterations:
            self._begin_block()

    def statistics(self) -> dict[str, Any]:
        """Return nothing, because nothing is kept beyond a block."""
        return {}

    def _begin_block(self) -> None:
        self._guesses = [self._prompt[i] for i in self._rng.integers(len(self._prompt), size=self.block_size)]
        self._iterations = 0
