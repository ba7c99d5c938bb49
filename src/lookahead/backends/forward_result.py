"""What a forward pass over a token tree gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.predictions import argmax, top_predictions


@dataclass(frozen=True)
class ForwardResult:
    """What a forward pass gave for one sequence.

    Attributes:
        logits: After each node that was read, `[reads, vocabulary]` float32. The static engine gives a row for every
            slot, in the model's number type, in a buffer that the next pass overwrites; `logits_after` copies from it.
        predictions: Argmax of `logits` for each node, `[nodes]` int64; -1 where nothing was read.
        top_ids: The likeliest tokens after each node, likeliest first, `[nodes, top_k]` int64; -1 likewise.
        top_probabilities: Their probabilities, `[nodes, top_k]` float32; 0 likewise.
    """

    logits: torch.Tensor
    predictions: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_probabilities: NDArray[np.float32]
    _rows: dict[int, int]
    _borrowed: bool = False

    def logits_after(self, node: int) -> torch.Tensor:
        """Logits of the token after `node`, `[1, vocabulary]` float32."""
        row = self._rows[node]
        logits = self.logits[row : row + 1]
        return logits.to(torch.float32, copy=True) if self._borrowed else logits

    def margin(self, node: int) -> float:
        """How far the logit of the likeliest token after `node` is above the second one."""
        first, second = self.logits_after(node)[0].topk(2).values.tolist()
        return float(first - second)


def forward_result(
    length: int,
    nodes: NDArray[np.int64],
    logits: torch.Tensor,
    top_k: int,
    rows: NDArray[np.int64] | None = None,
    borrowed: bool = False,
) -> ForwardResult:
    """The result that logits amount to.

    Args:
        length: Nodes of the tree.
        nodes: Those that were read, `[reads]`.
        logits: `[rows, vocabulary]` float32.
        top_k: How many of the likeliest tokens after each node are wanted.
        rows: The row of `logits` for each of `nodes`, `[reads]`; one after another if not given.
        borrowed: Whether the next pass overwrites `logits`.
    """
    rows = np.arange(len(nodes)) if rows is None else rows
    predictions = np.full(length, -1, dtype=np.int64)
    predictions[nodes] = argmax(logits).cpu().numpy()[rows]
    top_k = min(top_k, logits.shape[-1])
    top_ids = np.full((length, top_k), -1, dtype=np.int64)
    top_probabilities = np.zeros((length, top_k), dtype=np.float32)
    if top_k:
        ids, probabilities = top_predictions(logits, top_k)
        top_ids[nodes], top_probabilities[nodes] = ids.cpu().numpy()[rows], probabilities.cpu().numpy()[rows]
    by_node = dict(zip(nodes.tolist(), rows.tolist(), strict=True))
    return ForwardResult(logits, predictions, top_ids, top_probabilities, by_node, borrowed)
