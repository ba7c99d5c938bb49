"""The 2-D Jacobi window of lookahead decoding (section 3.1): where new n-grams come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree


class JacobiWindow:
    """W columns and N-1 rows of guesses about the text to come, one row for each past Jacobi iteration.

    Row 0 is the oldest. Its first token is the root itself; the other W-1 form a chain from the root, the
    *trunk*. Column i hangs from trunk token i: the token in row j, column i follows the one in row j-1 above
    it, and stands i+j places after the root. Each step the model predicts the token after the last row of each
    column; column and new token together are one n-gram. Then row 0 is dropped, the new tokens become the
    last row, and the window stands one position further on.

    The window starts with row 0 alone, W+N-3 random tokens of the prompt, and probabilities a row in each of N-2
    warm-up steps, each row one token shorter than it was as it slides.

    Args:
        window_size: W, columns.
        ngram_size: N; the window has N-1 rows.
        seed: Seed of the choice of prompt tokens.
    """

    def __init__(self, window_size: int, ngram_size: int, seed: int) -> None:
        self.window_size = window_size
        self.ngram_size = ngram_size
        self._seed = seed
        self._trunk: list[int] = []  # row 0 without the root: places 1, 2, ... after it
        self._rows: list[list[int]] = []  # rows 1, 2, ...: row j holds places j, j+1, ...
        self._last_row: list[int] = []  # this step's nodes of the last row, one a column

    @property
    def rows(self) -> list[list[int]]:
        """The token ids of the window, row 0 (without the root) first."""
        return [list(self._trunk), *(list(row) for row in self._rows)]

    def start(self, prompt: Sequence[int]) -> None:
        """Fill row 0 with random tokens of `prompt`."""
        rng = np.random.default_rng(self._seed)
        count = self.window_size + self.ngram_size - 3
        self._trunk = [prompt[i] for i in rng.integers(len(prompt), size=count)]
        self._rows = []
        self._last_row = []

    def propose(self, tree: TokenTree) -> None:
        """Add the window to `tree`, unless it reaches beyond the room that is left (the end of the context)."""
        self._last_row = []
        columns = len(self._rows[-1]) if self._rows else len(self._trunk) + 1
        if columns - 1 + len(self._rows) > tree.room:
            return
        last = len(self._rows)
        nodes = [tree.root]
        for token in self._trunk:
            nodes.append(tree.add_window_node(token, nodes[-1], needs_logits=last == 0))
        for number, row in enumerate(self._rows, start=1):
            nodes = [
                tree.add_window_node(token, parent, needs_logits=number == last)
                for token, parent in zip(row, nodes, strict=True)
            ]
        self._last_row = nodes

    def observe(self, result: StepResult) -> list[tuple[int, ...]]:
        """Take the new row, slide by one position, and return the n-grams that are finished (none in warm-up).

        A window that was not sent stays as it is.
        """
        if not self._last_row:
            return []
        largest = result.tree.vocabulary - 1
        new_row = [min(int(result.predictions[node]), largest) for node in self._last_row]
        self._last_row = []
        root = result.tree.tokens[result.tree.root]
        if len(self._rows) < self.ngram_size - 2:
            # Warm-up: every row loses the token whose place the next root takes.
            self._trunk = self._trunk[1:]
            self._rows = [row[1:] for row in self._rows] + [new_row[1:]]
            return []
        ngrams = list(zip([root, *self._trunk], *self._rows, new_row, strict=True))
        rows = [*self._rows, new_row]
        # The first token of row 1 stands where the next root will, and makes way for it.
        self._trunk, self._rows = rows[0][1:], rows[1:]
        return ngrams
