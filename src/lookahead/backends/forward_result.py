"""What a forward pass over token trees gave, and what the model predicts after each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.machine import Downloads
from lookahead.core.compiled import LOOPS
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
    is_listed = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    if is_listed and not LOOPS.awaited and vocabulary >= max(_LISTED_FROM, count * BLOCK):
        return _listed(logits, count)
    ids = logits.topk(count, dim=-1).indices
    return ids, torch.softmax(logits.float(), dim=-1).gather(1, ids)


def _listed(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    # Zeros, as the loop finds no token where logits are no numbers.
    ids, probabilities = np.zeros((rows, count), dtype=np.int64), np.zeros((rows, count), dtype=np.float32)
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
        predictions: The likeliest token, `[nodes]` int64; -1 likewise. `None` to find that of each row of logits when
            it is asked for.
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    predictions: NDArray[np.int64] | None = None


NOTHING = Listed(np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.float32))


class ForwardResult:
    """What a forward pass gave for the tree of one sequence.

    Args:
        logits: `[rows, vocabulary]`.
        rows: The row of `logits` for each node that was read.
        find: Finds what they say: a pass on another device is waited for when this is first asked for.
        borrowed: Whether the next pass overwrites `logits`.
        downloads: With what `find` comes to the host.

    Attributes:
        logits: After nodes that were read, float32; in static passes a row for every slot, in the model's number type.
        rows, borrowed, downloads: As above.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: dict[int, int],
        find: Callable[[], Listed],
        borrowed: bool = False,
        downloads: Downloads | None = None,
    ) -> None:
        self.logits, self.rows, self.borrowed = logits, rows, borrowed
        self.downloads = downloads or Downloads()
        self._find = find

    @cached_property
    def _listed(self) -> Listed:
        return self._find()

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
        found = self._listed.predictions
        return argmax(self.logits) if found is None else found

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
    downloads = Downloads()
    if is_here:
        here = _likeliest(logits, top_k)
        if len(lengths) == 1 == lengths[0] == len(logits):  # a step of plain decoding
            return [ForwardResult(logits, {0: 0}, lambda: here, borrowed, downloads)]
        found: Callable[[], Listed] = partial(here._replace, predictions=argmax(logits))
    else:
        read = downloads.add(pack_likeliest(logits, top_k) if listed is None else listed)
        found = cache(lambda: unpack_likeliest(read(), top_k))
    results, end = [], 0
    for place, (length, read_nodes) in enumerate(zip(lengths, nodes, strict=True)):
        start, end = end, end + len(read_nodes)
        numbers = np.arange(start, end) if rows is None else rows[place]
        numbered = dict(zip(read_nodes.tolist(), numbers.tolist(), strict=True))
        of_tree = partial(_of_tree, found, numbers, read_nodes, length)
        results.append(ForwardResult(logits, numbered, of_tree, borrowed, downloads))
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


def _of_tree(found: Callable[[], Listed], rows: NDArray[np.int64], nodes: NDArray[np.int64], length: int) -> Listed:
    """What is found of `rows` of logits, which are those after `nodes`, for all of a tree's nodes."""
    listed, spread = cast(tuple[NDArray[Any], ...], found()), list[NDArray[Any]]()
    if len(nodes) == length:  # none is unread
        row_of = np.empty(length, dtype=np.int64)
        row_of[nodes] = rows
        return Listed(*(values.take(row_of, axis=0) for values in listed))
    for values, unread in zip(listed, (-1, 0, -1), strict=True):
        spread.append(np.full((length, *values.shape[1:]), unread, dtype=values.dtype))
        spread[-1][nodes] = values[rows]
    return Listed(*spread)


def _likeliest(logits: torch.Tensor, top_k: int) -> Listed:
    """The `top_k` likeliest tokens of each row of logits on the CPU."""
    top_k = min(top_k, logits.shape[-1])
    if not top_k and len(logits) == 1:
        return NOTHING
    if not top_k or not len(logits):
        shape = len(logits), top_k
        return Listed(np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32))
    ids, probabilities = top_predictions(logits, top_k)
    return Listed(ids.numpy(), probabilities.numpy())
