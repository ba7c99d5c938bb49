"""What a forward pass over a token tree gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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


class OneNodeResult:
    """What a forward pass gave for one node, a step of plain decoding: nothing is looked up or copied.

    Args:
        logits: After the node, `[1, vocabulary]` float32.
        top_k: How many of the likeliest tokens are wanted.

    Attributes:
        logits, top_ids, top_probabilities: As of `ForwardResult`.
    """

    def __init__(self, logits: torch.Tensor, top_k: int) -> None:
        self.logits = logits
        self.top_ids, self.top_probabilities = _NO_IDS, _NO_PROBABILITIES
        if top_k:
            ids, probabilities = top_predictions(logits, min(top_k, logits.shape[-1]))
            self.top_ids, self.top_probabilities = ids.cpu().numpy(), probabilities.cpu().numpy()

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """Argmax of `logits`, `[1]` int64."""
        found: NDArray[np.int64] = argmax(self.logits).cpu().numpy()
        return found

    def logits_after(self, node: int) -> torch.Tensor:
        """As of `ForwardResult`."""
        return self.logits

    def as_tree(self) -> ForwardResult:
        """The same in the form that results of larger trees have."""
        return ForwardResult(self.logits, self.predictions, self.top_ids, self.top_probabilities, {0: 0})


_NO_IDS: NDArray[np.int64] = np.empty((1, 0), dtype=np.int64)
_NO_PROBABILITIES: NDArray[np.float32] = np.empty((1, 0), dtype=np.float32)


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
    likeliest, top = _likeliest(logits, top_k)
    return _placed(length, nodes, logits, rows, likeliest[rows], tuple(part[rows] for part in top), borrowed)


def forward_results(
    lengths: Sequence[int], nodes: Sequence[NDArray[np.int64]], logits: torch.Tensor, top_k: int
) -> list[ForwardResult]:
    """The results of several trees of one pass.

    Args:
        lengths: Nodes of each tree.
        nodes: Those of each that were read, `[reads]`.
        logits: After these, those of one tree after those of another, `[reads of all trees, vocabulary]` float32.
        top_k: How many of the likeliest tokens after each node are wanted.
    """
    likeliest, top = _likeliest(logits, top_k)
    counts = [len(own) for own in nodes]
    ends = np.cumsum(counts)
    results = []
    parts_of_logits: tuple[torch.Tensor, ...] = torch.split(logits, counts)
    for length, own, end, part in zip(lengths, nodes, ends, parts_of_logits, strict=True):
        place = slice(end - len(own), end)
        parts = tuple(values[place] for values in top)
        results.append(_placed(length, own, part, np.arange(len(own)), likeliest[place], parts))
    return results


Top = tuple[NDArray[Any], ...]
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
        top = tuple(part.cpu().numpy() for part in top_predictions(logits, top_k))
    else:
        top = np.empty((rows, top_k), dtype=np.int64), np.empty((rows, top_k), dtype=np.float32)
    return argmax(logits).cpu().numpy(), top


def _placed(
    length: int,
    nodes: NDArray[np.int64],
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    likeliest: NDArray[np.int64],
    top: Top,
    borrowed: bool = False,
) -> ForwardResult:
    """The result for a tree of `length` nodes, from what is known of `nodes`."""
    predictions = np.full(length, -1, dtype=np.int64)
    predictions[nodes] = likeliest
    ids, probabilities = top
    top_ids = np.full((length, ids.shape[1]), -1, dtype=np.int64)
    top_probabilities = np.zeros((length, ids.shape[1]), dtype=np.float32)
    top_ids[nodes], top_probabilities[nodes] = ids, probabilities
    by_node = dict(zip(nodes.tolist(), rows.tolist(), strict=True))
    return ForwardResult(logits, predictions, top_ids, top_probabilities, by_node, borrowed)
