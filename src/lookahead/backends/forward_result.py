"""What a forward pass over token trees gave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.predictions import argmax, top_predictions

_NO_IDS: NDArray[np.int64] = np.empty((1, 0), dtype=np.int64)
_NO_PROBABILITIES: NDArray[np.float32] = np.empty((1, 0), dtype=np.float32)


class ForwardResult:
    """What a forward pass gave for the tree of one sequence.

    Args:
        logits: `[rows, vocabulary]`.
        rows: The row of `logits` for each node that was read.
        top_ids: As below.
        top_probabilities: As below.
        predictions: As below; found when they are first asked for, if not given: a sampled step may not ask.
        borrowed: Whether the next pass overwrites `logits`.

    Attributes:
        logits: After nodes that were read, float32; in static passes a row for every slot, in the model's number type.
        rows, borrowed: As above.
        top_ids: The likeliest tokens after each node, likeliest first, `[nodes, top_k]` int64; -1 where nothing was
            read.
        top_probabilities: Their probabilities, `[nodes, top_k]` float32; 0 likewise.
        predictions: The likeliest token after each node, `[nodes]` int64; -1 likewise.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: dict[int, int],
        top_ids: NDArray[np.int64],
        top_probabilities: NDArray[np.float32],
        predictions: NDArray[np.int64] | None = None,
        borrowed: bool = False,
    ) -> None:
        self.logits, self.rows = logits, rows
        self.top_ids, self.top_probabilities = top_ids, top_probabilities
        self.borrowed = borrowed
        if predictions is not None:
            self.predictions = predictions

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """See above."""
        likeliest: NDArray[np.int64] = argmax(self.logits).cpu().numpy()
        if len(self.top_ids) == 1:
            return likeliest
        return _spread(likeliest[list(self.rows.values())], list(self.rows), len(self.top_ids), -1)

    def logits_after(self, node: int) -> torch.Tensor:
        """Logits of the token after `node`, `[1, vocabulary]` float32."""
        row = self.rows[node]
        logits = self.logits[row : row + 1] if len(self.logits) > 1 else self.logits
        return logits.to(torch.float32, copy=True) if self.borrowed else logits


def forward_results(
    lengths: Sequence[int],
    nodes: Sequence[NDArray[np.int64]],
    logits: torch.Tensor,
    top_k: int,
    rows: Sequence[NDArray[np.int64]] | None = None,
    borrowed: bool = False,
) -> list[ForwardResult]:
    """The results that the logits of one pass amount to.

    Args:
        lengths: Nodes of each tree.
        nodes: Those of each that were read, `[reads]`.
        logits: `[rows, vocabulary]` float32.
        top_k: How many of the likeliest tokens after each node are wanted.
        rows: The row of `logits` for each of `nodes`; one after another, those of one tree behind those of another, if
            not given.
        borrowed: Whether the next pass overwrites `logits`.
    """
    if len(lengths) == 1 == lengths[0] == len(logits) and logits.device.type == "cpu":  # a step of plain decoding
        ids, probabilities = _listed(logits, top_k) if top_k else (_NO_IDS, _NO_PROBABILITIES)
        return [ForwardResult(logits, {0: 0}, ids, probabilities, borrowed=borrowed)]
    likeliest, (ids, probabilities) = _likeliest(logits, top_k)
    results, end = [], 0
    for place, (length, read) in enumerate(zip(lengths, nodes, strict=True)):
        start, end = end, end + len(read)
        own: Any = slice(start, end) if rows is None else rows[place]
        numbers = range(start, end) if rows is None else rows[place].tolist()
        results.append(
            ForwardResult(
                logits,
                dict(zip(read.tolist(), numbers, strict=True)),
                _spread(ids[own], read, length, -1),
                _spread(probabilities[own], read, length, 0),
                _spread(likeliest[own], read, length, -1),
                borrowed,
            )
        )
    return results


def _spread(values: NDArray[Any], nodes: Any, length: int, unread: int) -> NDArray[Any]:
    """What is known of `nodes` as an array over all of a tree's nodes."""
    spread = np.full((length, *values.shape[1:]), unread, dtype=values.dtype)
    spread[nodes] = values
    return spread


Top = tuple[NDArray[Any], NDArray[Any]]
"""Likeliest tokens `[rows, top_k]` and their probabilities."""


def _likeliest(logits: torch.Tensor, top_k: int) -> tuple[NDArray[np.int64], Top]:
    """The likeliest token of each row of logits, and its `top_k` likeliest ones."""
    rows, top_k = len(logits), min(top_k, logits.shape[-1])
    if top_k and rows and logits.device.type != "cpu":  # one copy, as each makes the host wait
        ids, probabilities = top_predictions(logits, top_k)
        parts = argmax(logits)[:, None].int(), ids.int(), probabilities.view(torch.int32)
        packed = torch.cat(parts, dim=1).cpu().numpy()
        listed = packed[:, 1 : 1 + top_k].astype(np.int64), packed[:, 1 + top_k :].view(np.float32)
        return packed[:, 0].astype(np.int64), listed
    if top_k and rows:
        return argmax(logits).cpu().numpy(), _listed(logits, top_k)
    return argmax(logits).cpu().numpy(), nothing_listed(rows, top_k)


def nothing_listed(rows: int, top_k: int = 0) -> Top:
    """Likeliest tokens of none, and their probabilities."""
    return np.full((rows, top_k), -1, dtype=np.int64), np.zeros((rows, top_k), dtype=np.float32)


def _listed(logits: torch.Tensor, top_k: int) -> Top:
    ids, probabilities = top_predictions(logits, min(top_k, logits.shape[-1]))
    return ids.numpy(), probabilities.numpy()
