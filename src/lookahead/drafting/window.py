"""2-D Jacobi window of lookahead decoding (section 3.1), the generator of n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree


class JacobiWindow:
    """Window of W columns and N-1 rows of guesses for future tokens, one row for each past Jacobi iteration.

    Row 0 is the oldest. Its first token is the root; the other W-1 form a chain from the root, the *trunk*. Column i
    hangs from trunk token i: the token in row j follows the token in row j-1 of the same column, and is i+j positions
    after the root. Each step the model predicts the token after the last row of each column; the column and the new
    token are one n-gram. Then row 0 is dropped, the new tokens become the last row, and the window moves on by one
    position.

    The window starts with row 0 only, W+N-3 random tokens of the prompt, and gains a row in each of the N-2 warm-up
    steps. Each warm-up step also shortens every row by one token, as the window slides.

    Args:
        window_size: W, columns.
        ngram_size: N; the window has N-1 rows.
        seed: Seed of the choice of prompt tokens.
    """

    def __init__(self, window_size: int, ngram_size: int, seed: int) -> None:
        self.window_size = window_size
        self.ngram_size = ngram_size
        self._seed = seed
        self._trunk: list[int] = []  # row 0 without the root: positions 1, 2, ... after it
        self._rows: list[list[int]] = []  # rows 1, 2, ...: row j holds positions j, j+1, ...
        self._last_row: list[int] = []  # this step's nodes of the last row, one per column

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
        """Add the window to `tree`, unless it would exceed the remaining context."""
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
        """Add the new row, slide by one position, and return the finished n-grams (none in warm-up).

        A window that was not sent is unchanged.
        """
        if not self._last_row:
            return []
        largest = result.tree.vocabulary - 1
        new_row = [min(int(result.predictions[node]), largest) for node in self._last_row]
        self._last_row = []
        root = result.tree.tokens[result.tree.root]
        if len(self._rows) < self.ngram_size - 2:
            # Warm-up: the next root replaces the first token of every row.
            self._trunk = self._trunk[1:]
            self._rows = [row[1:] for row in self._rows] + [new_row[1:]]
            return []
        ngrams = list(zip([root, *self._trunk], *self._rows, new_row, strict=True))
        rows = [*self._rows, new_row]
        # The next root replaces the first token of row 1.
        self._trunk = rows[0][1:]
        self._rows = rows[1:]
        return ngrams
