"""N-gram pool of lookahead decoding (section 3.2): n-grams from the window, by first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError
from lookahead.values import require, whole_number


class NGramPool:
    """Pool of at most `guess_set_size` n-grams per first token; the least recently used one is replaced.

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
