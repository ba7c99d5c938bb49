"""Lookahead decoding as published: the window generates n-grams, the pool stores them, the tree verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.core.results import StepResult
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.core.watching import WINDOW, Explanation, Origin
from lookahead.drafting.pool import NGramPool
from lookahead.drafting.window import JacobiWindow


class PaperDrafter:
    """Drafter of Algorithm 2 of the paper.

    Each step verifies the pool's n-grams that begin with the last decided token (the verification branch)
    and advances the window (the lookahead branch). Its finished n-grams go to the pool.

    Args:
        window: The lookahead branch.
        pool: N-gram pool.
        pool_from_prompt: Fill the pool with the n-grams of the prompt first.
        pool_from_output: Fill the pool with the n-grams of the generated text as well.
    """

    top_k = 0

    def __init__(
        self, window: JacobiWindow, pool: NGramPool, pool_from_prompt: bool = False, pool_from_output: bool = False
    ) -> None:
        self.window = window
        self.pool = pool
        self._pool_from_prompt = pool_from_prompt
        self._pool_from_output = pool_from_output
        self._text_end: list[int] = []  # the last N-1 tokens, the start of the next n-grams of the text

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence: a new window, and the pool filled from the prompt if so configured."""
        self.window.start(prompt)
        if self._pool_from_prompt:
            self.pool.add_text(prompt)
        self._keep_text_end(prompt)

    def propose(self, tree: TokenTree) -> None:
        """Add the candidates, most recently used first, and the window."""
        for guess in self.pool.lookup(tree.tokens[tree.root]):
            tree.add_candidates(guess)
        self.window.propose(tree)

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the pool as the source of candidates, and the window as the source of other nodes."""
        kinds = tree.kinds[tree.root + 1 :]
        origins = [Origin(("n-gram pool" if kind is NodeKind.CANDIDATE else WINDOW,)) for kind in kinds]
        return Explanation(origins, len(self.pool))

    def observe(self, result: StepResult) -> None:
        """Slide the window and fill the pool."""
        for ngram in self.window.observe(result):
            self.pool.add(ngram)
        if self._pool_from_output:
            text = [*self._text_end, *result.tokens]
            self.pool.add_text(text)
            self._keep_text_end(text)

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the pool; see `NGramPool.statistics`."""
        return self.pool.statistics()

    def _keep_text_end(self, text: Sequence[int]) -> None:
        self._text_end = list(text[-(self.pool.ngram_size - 1) :])
