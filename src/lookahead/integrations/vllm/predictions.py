"""What the target model predicts at the positions that vLLM samples from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.predictions import top_predictions

_MOST_CALLS = 4
"""Calls of one step that are read: the one before sampling, and those for log-probabilities of a prompt."""


class Predictions(NamedTuple):
    """What follows some positions, one row for each.

    Attributes:
        ids: The likeliest tokens, likeliest first, `[rows, top_k]` int64.
        probabilities: Their probabilities, likewise, float32.
        are_read: Which of the requests that they are about they are known of, `[requests]`.
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    are_read: NDArray[np.bool_]


class TargetPredictions:
    """Reads along when a model computes logits.

    vLLM gives proposers the target model, and no logits. So the method `compute_logits` of this one object, not of
    its class, is called through here. The likeliest tokens are listed before vLLM sees the logits: processors, grammars
    and temperatures change them in place.

    Args:
        model: The target model.
        vocabulary: How many tokens it knows; logits may have more columns.
        top_k: How many tokens are listed for each row.
        most_rows: Most rows that a step can have; larger calls are about something else.
    """

    def __init__(self, model: Any, vocabulary: int, top_k: int, most_rows: int) -> None:
        self._vocabulary = vocabulary
        self._top_k = top_k
        self._most_rows = most_rows
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counts = np.empty(0, dtype=np.int64)  # rows of each request
        self._are_read = np.empty(0, dtype=np.bool_)
        self._rows = -1  # how many these are, if some of them are not read
        self._rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def expect(self, counts: NDArray[np.int64], are_read: NDArray[np.bool_]) -> None:
        """What the step that follows is about, if it is about the same requests as the one before.

        Args:
            counts: How many rows each request has, `[requests]`.
            are_read: Whether they are to be read, `[requests]`. If none of them is, nothing is, whatever it is about.
        """
        self._calls = []
        self._counts, self._are_read = counts, are_read
        self._rests = len(counts) > 0 and not are_read.any()
        self._rows = -1 if are_read.all() else int(counts.sum())

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        reads = not self._rests and len(self._calls) < _MOST_CALLS
        # With several ranks only one of them may have logits.
        if reads and isinstance(logits, torch.Tensor) and 0 < logits.shape[0] <= self._most_rows:
            self._list(logits)
        return logits

    def _list(self, logits: torch.Tensor) -> None:
        logits = logits.detach()[:, : self._vocabulary]
        read = np.repeat(self._are_read, self._counts) if logits.shape[0] == self._rows else None
        self._calls.append(top_predictions(logits, self._top_k, read))

    def take(self, counts: NDArray[np.int64]) -> Predictions | None:
        """What was said since the last time, if it was about requests of so many rows each. The first call about as
        many rows is the one before sampling."""
        rows = int(counts.sum())
        for ids, probabilities in self._calls:
            if len(ids) == rows:
                told = ids.cpu().numpy(), probabilities.float().cpu().numpy()
                return Predictions(*told, self._which(told[0], counts))
        return None

    def _which(self, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The requests whose rows were read; where it is not known which these are, by their tokens."""
        if len(ids) == self._rows and np.array_equal(self._counts, counts):
            return self._are_read
        least: NDArray[np.int64] = np.minimum.reduceat(ids[:, 0], np.cumsum(counts) - counts)
        return least >= 0
