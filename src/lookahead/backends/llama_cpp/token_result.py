"""What a step of plain decoding gave: the logits after one token, with as little made of them as is asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.predictions import top_predictions

_NO_IDS: NDArray[np.int64] = np.empty((1, 0), dtype=np.int64)
_NO_PROBABILITIES: NDArray[np.float32] = np.empty((1, 0), dtype=np.float32)


class TokenResult:
    """The result of a tree that is one token.

    Args:
        logits: After the token, `[vocabulary]` float32, in a buffer that the next step overwrites.
        top_k: How many of the likeliest tokens are wanted.

    Attributes:
        top_ids, top_probabilities: As of `ForwardResult`.
    """

    def __init__(self, logits: NDArray[np.float32], top_k: int) -> None:
        self._logits = logits
        self.top_ids, self.top_probabilities = _NO_IDS, _NO_PROBABILITIES
        if top_k:
            ids, probabilities = top_predictions(torch.from_numpy(logits)[None], min(top_k, len(logits)))
            self.top_ids, self.top_probabilities = ids.numpy(), probabilities.numpy()

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token, the first one of equals, `[1]` int64."""
        return np.array([self._logits.argmax()])

    def logits_after(self, node: int) -> torch.Tensor:
        """Logits after the token, `[1, vocabulary]` float32, in memory of their own."""
        return torch.from_numpy(self._logits.copy())[None]
