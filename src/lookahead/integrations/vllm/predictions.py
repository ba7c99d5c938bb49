"""What the target model predicts at the positions that vLLM samples from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.predictions import argmax, top_predictions

_MOST_CALLS = 4
"""Calls of one step that are kept: the one before sampling, and those for log-probabilities of a prompt."""


@dataclass(frozen=True)
class Predictions:
    """What follows some positions, one row for each.

    Attributes:
        best: The likeliest token, `[rows]` int64.
        ids: The likeliest tokens, likeliest first, `[rows, top_k]` int64.
        probabilities: Their probabilities, likewise, float32.
    """

    best: NDArray[np.int64]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]

    def part(self, begin: int, end: int) -> Predictions:
        """Those rows."""
        return Predictions(self.best[begin:end], self.ids[begin:end], self.probabilities[begin:end])


class TargetPredictions:
    """Reads along when a model computes logits.

    vLLM gives proposers the target model, and no logits. So the method `compute_logits` of this one object, not of
    its class, is called through here. The likeliest tokens are listed before vLLM sees the logits: processors, grammars
    and temperatures change them in place.

    Args:
        model: The target model.
        vocabulary: How many tokens it knows; logits may have more columns.
        most_rows: Most rows that a step can have; larger calls are about something else.

    Attributes:
        top_k: How many tokens are listed for each row; 0 for the likeliest alone.
        rests: Whether nothing is read for the time being.
    """

    def __init__(self, model: Any, vocabulary: int, most_rows: int) -> None:
        self._vocabulary = vocabulary
        self._most_rows = most_rows
        self._calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.top_k = 0
        self.rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        # With several ranks only one of them may have logits.
        if not self.rests and isinstance(logits, torch.Tensor) and 0 < logits.shape[0] <= self._most_rows:
            self._list(logits)
        return logits

    def _list(self, logits: torch.Tensor) -> None:
        logits = logits.detach()[:, : self._vocabulary]
        if self.top_k:
            ids, probabilities = top_predictions(logits, self.top_k)
            best = ids[:, 0]
        else:
            best = argmax(logits)
            ids, probabilities = best.new_empty((len(best), 0)), logits.new_empty((len(best), 0))
        self._calls = [*self._calls, (best, ids, probabilities)][-_MOST_CALLS:]

    def take(self, rows: int) -> Predictions | None:
        """What was said since the last time, if it was about so many rows. The first such call is the one before
        sampling."""
        calls, self._calls = self._calls, []
        for best, ids, probabilities in calls:
            if len(best) == rows:
                told = best.cpu().numpy(), ids.cpu().numpy(), probabilities.float().cpu().numpy()
                return Predictions(*told)
        return None
