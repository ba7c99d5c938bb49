"""What the target model predicts at the positions that vLLM samples from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.forward_result import top_predictions

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
        self._rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def expect(self, reads: bool) -> None:
        """Forget what was said, and read the step that follows, or do not."""
        self._calls = []
        self._rests = not reads

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        reads = not self._rests and len(self._calls) < _MOST_CALLS
        # With several ranks only one of them may have logits.
        if reads and isinstance(logits, torch.Tensor) and 0 < logits.shape[0] <= self._most_rows:
            self._calls.append(top_predictions(logits.detach()[:, : self._vocabulary], self._top_k))
        return logits

    def take(self, rows: int) -> Predictions | None:
        """What was said since the last time, if it was about so many rows. The first call about as many is the one
        before sampling."""
        for ids, probabilities in self._calls:
            if len(ids) == rows:
                return Predictions(ids.cpu().numpy(), probabilities.float().cpu().numpy())
        return None
