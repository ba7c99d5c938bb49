"""Lookahead decoding as published: the window generates n-grams, the pool stores them, the tree verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.core.results import StepResult
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.core.watching import WINDOW, Explanation, Origin
from lookahead.errors import InvalidArgumentError
from lookahead.values import require, whole_number


class JacobiWindow:
    """2-D Jacobi window of lookahead decoding (section 3.1), the generator of n-grams.

    It has W columns and N-1 rows of guesses for future tokens, one row for each past Jacobi iteration.

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


class NGramPool:
    """N-gram pool of lookahead decoding (section 3.2): at most `guess_set_size` n-grams per first token.

    The least recently used one is replaced.
    An n-gram is used when the window or the text contains it again. For a vocabulary of V tokens the pool never holds
    more than V * G n-grams of N-1 tokens each.

    Args:
        ngram_size: N, tokens in an n-gram, its first token included.
        guess_set_size: G, n-grams kept for each first token.

    Raises:
        InvalidArgumentError: A size is no whole number, or too small.
    """

    def __init__(self, ngram_size: int, guess_set_size: int) -> None:
        self.ngram_size = whole_number("ngram_size", ngram_size, 2)
        self.guess_set_size = whole_number("guess_set_size", guess_set_size, 1)
        # first token -> the N-1 tokens that followed it, oldest first (a dict keeps order and finds quickly)
        self._guesses: dict[int, dict[tuple[int, ...], None]] = {}

        self._lookups = self._hits = 0

    def __len__(self) -> int:
        return sum(len(guesses) for guesses in self._guesses.values())

    def add(self, ngram: Sequence[int]) -> None:
        """Add `ngram`, `ngram_size` token ids, as the most recently used one of its first token."""
        guesses = self._guesses.setdefault(ngram[0], {})
        guess = tuple(ngram[1:])
        guesses.pop(guess, None)
        guesses[guess] = None
        if len(guesses) > self.guess_set_size:
            del guesses[next(iter(guesses))]

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text, from its beginning to its end."""
        for start in range(len(tokens) - self.ngram_size + 1):
            self.add(tokens[start : start + self.ngram_size])

    def lookup(self, first: int) -> list[tuple[int, ...]]:
        """Return the continuations of the token `first`, `ngram_size - 1` token ids each, most recently used first."""
        guesses = self._guesses.get(first, {})
        self._lookups += 1
        self._hits += bool(guesses)
        return list(reversed(guesses))

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of n-grams and first tokens, n-grams per first token, lookups, and the hit rate."""
        entries = len(self)
        keys = len(self._guesses)
        return {
            "entries": entries,
            "keys": keys,
            "fan_out": entries / max(keys, 1),
            "lookups": self._lookups,
            "hit_rate": self._hits / max(self._lookups, 1),
        }


def check_pool(pool: NGramPool | None, config: LookaheadConfig) -> None:
    """Raise an error if a pool does not match the configuration.

    Raises:
        InvalidArgumentError: The pool has another type, preset or n-gram size.
    """
    if pool is None:
        return
    is_pool = isinstance(pool, NGramPool)
    require(is_pool, "ngram_pool", pool, "must be a lookahead.NGramPool, or None for a new one")
    if config.preset != "paper":
        raise InvalidArgumentError(
            f"ngram_pool has no effect with preset={config.preset!r}; use it with preset='paper'"
        )
    if pool.ngram_size != config.ngram_size:
        raise InvalidArgumentError(
            f"ngram_pool holds n-grams of {pool.ngram_size} tokens, but lookahead_config.ngram_size={config.ngram_size}"
        )


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
