"""What a forward pass over token trees gave, and what the model predicts after each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.machine import Downloads
from lookahead.core.compiled import IS_COMPILED
from lookahead.core.likeliest import BLOCK, list_likeliest, list_likeliest_bits

_LISTED_FROM = 4096
"""Vocabularies from which on the compiled loop lists the likeliest tokens."""


def argmax(logits: torch.Tensor) -> NDArray[np.int64]:
    """Likeliest token of each row, the first one of equals, as `torch.argmax` and so transformers choose it.

    On CPUs by numpy, in a tenth of the time that torch takes.

    Args:
        logits: `[rows, vocabulary]` floating point.

    Returns:
        Token ids `[rows]`.
    """
    if logits.device.type != "cpu":
        return np.asarray(logits.argmax(dim=-1).cpu())
    return np.asarray(logits.detach().float().numpy().argmax(axis=-1))


def top_predictions(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row and their probabilities, likeliest first.

    On CPUs a compiled loop reads each row once, without a softmax of all of it.

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16.
        count: How many; at most the vocabulary.

    Returns:
        Token ids `[rows, count]` int64 and probabilities `[rows, count]` float32 (softmax over the vocabulary). On CPUs
        those of large vocabularies are exact to three digits: drafts need no more.
    """
    vocabulary = logits.shape[1]
    is_listed = IS_COMPILED and logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    if is_listed and vocabulary >= max(_LISTED_FROM, count * BLOCK) and not torch.compiler.is_compiling():
        return _listed(logits, count)
    ids = logits.topk(count, dim=-1).indices
    return ids, torch.softmax(logits.float(), dim=-1).gather(1, ids)


def _listed(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    ids, probabilities = np.empty((rows, count), dtype=np.int64), np.empty((rows, count), dtype=np.float32)
    maxima, values = (np.empty(size, dtype=np.float32) for size in (vocabulary // BLOCK, count))
    room = maxima, np.empty(count, dtype=np.int64), values, ids, probabilities
    logits = logits.detach().contiguous()
    if logits.dtype == torch.float32:
        list_likeliest(logits.numpy(), *room)
    else:
        list_likeliest_bits(logits.view(torch.int16).numpy(), np.empty(vocabulary, dtype=np.float32), *room)
    return torch.from_numpy(ids), torch.from_numpy(probabilities)


class Listed(NamedTuple):
    """What is known of each node of a tree, or of each row of logits.

    Attributes:
        ids: The likeliest tokens, likeliest first, `[nodes, top_k]` int64; -1 where nothing was read.
        probabilities: Their probabilities, `[nodes, top_k]` float32; 0 likewise.
        predictions: The likeliest token, `[nodes]` int64; -1 likewise. `None` to find it when asked for.
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    predictions: NDArray[np.int64] | None = None


_NOTHING = Listed(np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.float32))


class ForwardResult:
    """What a forward pass gave for the tree of one sequence.

    Args:
        logits: `[rows, vocabulary]`.
        rows: The row of `logits` for each node that was read.
        listed: What they say, or what finds it: a pass on another device is waited for when this is first asked for.
        borrowed: Whether the next pass overwrites `logits`.
        downloads: With what `listed` comes to the host.

    Attributes:
        logits: After nodes that were read, float32; in static passes a row for every slot, in the model's number type.
        rows, borrowed, downloads: As above.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: dict[int, int],
        listed: Listed | Callable[[], Listed],
        borrowed: bool = False,
        downloads: Downloads | None = None,
    ) -> None:
        self.logits, self.rows = logits, rows
        self.borrowed = borrowed
        self.downloads = downloads or Downloads()
        self._given = listed

    @cached_property
    def _listed(self) -> Listed:
        return self._given if isinstance(self._given, Listed) else self._given()

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """See `NodeOutputs`."""
        return self._listed.ids

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """See `NodeOutputs`."""
        return self._listed.probabilities

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """See `NodeOutputs`. A sampled step of plain decoding may not ask."""
        if self._listed.predictions is not None:
            return self._listed.predictions
        likeliest = argmax(self.logits)
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
    listed: torch.Tensor | None = None,
) -> list[ForwardResult]:
    """The results that the logits of one pass amount to.

    Args:
        lengths: Nodes of each tree.
        nodes: Those of each that were read, `[reads]`.
        logits: `[rows, vocabulary]`; float32 where `listed` is not given.
        top_k: How many of the likeliest tokens after each node are wanted.
        rows: The row of `logits` for each of `nodes`; one after another, those of one tree behind those of another, if
            not given.
        borrowed: Whether the next pass overwrites `logits`.
        listed: What `pack_likeliest` made of `logits`, with `top_k` or more, where the pass did that.
    """
    is_here = listed is None and logits.device.type == "cpu"
    if len(lengths) == 1 == lengths[0] == len(logits) and is_here:  # a step of plain decoding
        return [ForwardResult(logits, {0: 0}, _likeliest(logits, top_k) if top_k else _NOTHING, borrowed)]
    found: Listed | Callable[[], Listed]
    downloads = Downloads()
    if is_here:
        found = _likeliest(logits, top_k)._replace(predictions=argmax(logits))
    else:
        read = downloads.add(pack_likeliest(logits, top_k) if listed is None else listed)
        found = cache(lambda: unpack_likeliest(read(), top_k))
    results, end = [], 0
    for place, (length, read_nodes) in enumerate(zip(lengths, nodes, strict=True)):
        start, end = end, end + len(read_nodes)
        numbers = np.arange(start, end) if rows is None else rows[place]
        numbered = dict(zip(read_nodes.tolist(), numbers.tolist(), strict=True))
        results.append(ForwardResult(logits, numbered, spread(found, numbers, read_nodes, length), borrowed, downloads))
    return results


def pack_likeliest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """What the logits `[rows, vocabulary]` say, in int32 `[rows, 1 + 2 * top_k]`: the likeliest token, the `top_k`
    likeliest ones, and the bits of their probabilities in float32."""
    top_k = min(top_k, logits.shape[-1])
    parts = [logits.argmax(dim=-1, keepdim=True).int()]  # by torch, since it may be recorded
    if top_k:
        ids, probabilities = top_predictions(logits, top_k)
        parts += [ids.int(), probabilities.view(torch.int32)]
    return torch.cat(parts, dim=-1) if top_k else parts[0]


def unpack_likeliest(packed: NDArray[np.int32], top_k: int) -> Listed:
    """The `top_k` likeliest tokens of what `pack_likeliest` packed, of each row."""
    most = (packed.shape[1] - 1) // 2
    top_k = min(top_k, most)
    ids, probabilities = packed[:, 1 : 1 + top_k].astype(np.int64), packed[:, 1 + most : 1 + most + top_k].copy()
    return Listed(ids, probabilities.view(np.float32), packed[:, 0].astype(np.int64))


def spread(
    found: Listed | Callable[[], Listed], rows: NDArray[np.int64], nodes: NDArray[np.int64], length: int
) -> Listed | Callable[[], Listed]:
    """What is found of `rows` of logits, which are those after `nodes`, as arrays over all of the tree's nodes."""
    if callable(found):
        return lambda: _spread_all(found(), rows, nodes, length)
    return _spread_all(found, rows, nodes, length)


def _spread_all(found: Listed, rows: NDArray[np.int64], nodes: NDArray[np.int64], length: int) -> Listed:
    assert found.predictions is not None
    return Listed(
        _spread(found.ids[rows], nodes, length, -1),
        _spread(found.probabilities[rows], nodes, length, 0),
        _spread(found.predictions[rows], nodes, length, -1),
    )


def _spread(values: NDArray[Any], nodes: Any, length: int, unread: int) -> NDArray[Any]:
    """What is known of `nodes` as an array over all of a tree's nodes."""
    spread = np.full((length, *values.shape[1:]), unread, dtype=values.dtype)
    spread[nodes] = values
    return spread


def nothing_listed(rows: int, top_k: int = 0) -> Listed:
    """Likeliest tokens of none."""
    return Listed(np.full((rows, top_k), -1, dtype=np.int64), np.zeros((rows, top_k), dtype=np.float32))


def _likeliest(logits: torch.Tensor, top_k: int) -> Listed:
    """The `top_k` likeliest tokens of each row of logits on the CPU."""
    if not top_k or not len(logits):
        return nothing_listed(len(logits), min(top_k, logits.shape[-1]))
    ids, probabilities = top_predictions(logits, min(top_k, logits.shape[-1]))
    return Listed(ids.numpy(), probabilities.numpy())
