"""What the target model predicts at the positions that vLLM samples from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


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
        self._parts: list[tuple[int, bool]] = []
        self._rows = -1  # how many rows of these parts there are
        self._rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def expect(self, parts: Sequence[tuple[int, bool]]) -> None:
        """What the step that follows is about, if it is about the same requests as the one before.

        Args:
            parts: For each request how many rows it has, and whether they are to be read. If none of them is, nothing
                is, whatever it is about.
        """
        self._calls = []
        self._parts = list(parts)
        self._rests = bool(parts) and not any(read for _, read in parts)
        self._rows = -1 if all(read for _, read in parts) else sum(rows for rows, _ in parts)

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        reads = not self._rests and len(self._calls) < _MOST_CALLS
        # With several ranks only one of them may have logits.
        if reads and isinstance(logits, torch.Tensor) and 0 < logits.shape[0] <= self._most_rows:
            self._list(logits)
        return logits

    def _list(self, logits: torch.Tensor) -> None:
        logits = logits.detach()[:, : self._vocabulary]
        read = None
        if logits.shape[0] == self._rows:
            read = [read for count, read in self._parts for _ in range(count)]
        self._calls.append(top_predictions(logits, self._top_k, read))

    def take(self, counts: Sequence[int]) -> list[Predictions | None]:
        """What was said since the last time, if it was about requests of so many rows each; `None` for each that was
        not read. The first call about so many rows is the one before sampling."""
        rows = sum(counts)
        for ids, probabilities in self._calls:
            if len(ids) == rows:
                told = Predictions(ids.cpu().numpy(), probabilities.float().cpu().numpy())
                same = len(ids) == self._rows and [part[0] for part in self._parts] == list(counts)
                return list(_parts(told, counts, [read for _, read in self._parts] if same else None))
        return [None] * len(counts)


def _parts(told: Predictions, counts: Sequence[int], read: Sequence[bool] | None) -> Iterator[Predictions | None]:
    """The rows of each request, if they were read; where it is not known whether they were, by their tokens."""
    if read is None:
        are_read = told.ids[:, 0] >= 0
        ends = np.cumsum(counts)
        read = [bool(are_read[end - count : end].all()) for count, end in zip(counts, ends, strict=True)]
    begin = 0
    for count, is_read in zip(counts, read, strict=True):
        part = slice(begin, begin + count)
        yield Predictions(told.ids[part], told.probabilities[part]) if is_read else None
        begin += count
