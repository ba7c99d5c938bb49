"""Tokens that the model predicted lately: tried after the root with nodes that nothing better takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner
from lookahead.drafting.auto.ngram_entries import Entries, entry_after

_READ = 512
_LATEST = 128
MOST_TRIED = 64
"""Most predictions that are tried after the root when nothing better is left."""

_KNOWN_SHARE = 0.25
"""What a prediction counts if the memory knows already what comes after it: what it teaches is worth less."""


class RecentArrays(NamedTuple):
    """Tokens, the latest first, and the probability that each of the first of them is given to follow the root."""

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float64]


NOTHING_RECENT = RecentArrays(np.zeros(0, dtype=np.int64), np.zeros(0))


class RecentPredictions:
    """The tokens of the end of the prompt, and what the model predicted since, each once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # the latest first
        self._probabilities = 0.001 / np.arange(4, 4 + MOST_TRIED, dtype=np.float64)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a text."""
        self._tokens = []
        self.note(list(prompt[-_READ:])[::-1])

    def note(self, tokens: Sequence[int]) -> None:
        """Put the tokens, the latest first, before all others."""
        self._tokens = list(dict.fromkeys([*tokens, *self._tokens]))[:_LATEST]

    def arrays(self) -> RecentArrays:
        """What compiled loops read."""
        return RecentArrays(np.array(self._tokens, dtype=np.int64), self._probabilities)


@inner
def probability_of(index: int, recent: RecentArrays, entries: Entries) -> float:
    """How likely a recent prediction is taken to be; less if the memory knows what comes after it."""
    known = entry_after(recent.tokens[index], entries) >= 0
    return float(recent.probabilities[index] * (_KNOWN_SHARE if known else 1.0))
