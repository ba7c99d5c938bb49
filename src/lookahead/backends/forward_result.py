"""Results of a forward pass over token trees: logits, and the likeliest tokens after each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.machine import Downloads
from lookahead.core.compiled import LOOPS
from lookahead.core.forest import Forest
from lookahead.core.likeliest import BLOCK, list_likeliest, list_likeliest_bits

_LISTED_FROM = 4096
"""Minimum vocabulary for listing the likeliest tokens by the compiled loop."""


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
        probabilities of large vocabularies are exact to three digits: drafts need no more.
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
    ids = np.zeros((rows, count), dtype=np.int64)
    probabilities = np.zeros((rows, count), dtype=np.float32)
    maxima = np.empty(vocabulary // BLOCK, dtype=np.float32)
    values = np.empty(count, dtype=np.float32)
    room = maxima, np.empty(count, dtype=np.int64), values, ids, probabilities
    logits = logits.detach().contiguous()
    if logits.dtype == torch.float32:
        list_likeliest(logits.numpy(), *room)
    else:
        list_likeliest_bits(logits.view(torch.int16).numpy(), np.empty(vocabulary, dtype=np.float32), *room)
    return torch.from_numpy(ids), torch.from_numpy(probabilities)


class Listed(NamedTuple):
    """The likeliest tokens after nodes, or of rows of logits.

    Attributes:
        ids: The likeliest tokens, likeliest first, `[nodes, top_k]` int64; -1 where nothing was read.
        probabilities: Their probabilities, `[nodes, top_k]` float32; 0 where nothing was read.
        predictions: The likeliest token, `[nodes]` int64; -1 where nothing was read. `None` to compute it from the
            logits when it is first asked for.
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    predictions: NDArray[np.int64] | None = None


class PassResult(Sequence["TreeResult"]):
    """The result of a forward pass over some trees, as arrays in the order of `Forest`; as a sequence, the result of
    each tree.

    Args:
        forest: The trees.
        logits: `[rows of logits, vocabulary]`.
        logit_rows: Row of the logits after each node, `[nodes]`; -1 where nothing was read.
        find: Returns the likeliest tokens after each node. A pass on a device is waited for when this is first asked.
        borrowed: Whether the next pass overwrites `logits`.
        downloads: Copies from the device, made together with the copy of `find`.

    Attributes:
        logits: After nodes that were read, float32; in static passes a row for every slot, in the model's number type.
        native: Arrays of the model's engine, for its own selection of tokens.
        logit_rows, borrowed, downloads: The arguments.
    """

    def __init__(
        self,
        forest: Forest,
        logits: torch.Tensor,
        logit_rows: NDArray[np.int64],
        find: Callable[[], Listed],
        borrowed: bool = False,
        downloads: Downloads | None = None,
    ) -> None:
        self.logits = logits
        self.native: Any = None
        self.logit_rows = logit_rows
        self.borrowed = borrowed
        self.downloads = downloads or Downloads()
        self._forest = forest
        self._find = find

    def __len__(self) -> int:
        return len(self._forest)

    @overload
    def __getitem__(self, row: int) -> TreeResult: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[TreeResult]: ...

    def __getitem__(self, row: int | slice) -> TreeResult | Sequence[TreeResult]:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        return TreeResult(self, *self._bounds[row])

    def __iter__(self) -> Iterator[TreeResult]:
        return (TreeResult(self, *bounds) for bounds in self._bounds)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """Index of the first node of each tree, and behind its last one."""
        return [*pairwise(self._forest.firsts.tolist())]

    @cached_property
    def _listed(self) -> Listed:
        return self._find()

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """The likeliest tokens after each node, `[nodes, top_k]`; see `NodeOutputs`."""
        return self._listed.ids

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """Their probabilities, `[nodes, top_k]`."""
        return self._listed.probabilities

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token after each node, `[nodes]`; -1 where nothing was read."""
        predictions = self._listed.predictions  # a sampled step of plain decoding may not ask
        if predictions is None:
            reads_all = len(self._forest.read_nodes) == len(self.logit_rows)
            predictions = _spread(argmax(self.logits), self.logit_rows, -1, reads_all)
        return predictions


class TreeResult:
    """The result of a forward pass for the tree of one sequence.

    Args:
        result: Of the whole pass.
        begin: Index of its first node there.
        end: Index behind its last one.

    Attributes:
        whole: Of the whole pass.
    """

    __slots__ = ("_begin", "_end", "whole")

    def __init__(self, result: PassResult, begin: int, end: int) -> None:
        self.whole = result
        self._begin = begin
        self._end = end

    @property
    def logits(self) -> torch.Tensor:
        """The logits of all rows; see `PassResult`."""
        return self.whole.logits

    @property
    def downloads(self) -> Downloads:
        """See `PassResult`."""
        return self.whole.downloads

    @property
    def predictions(self) -> NDArray[np.int64]:
        """See `NodeOutputs`."""
        return self.whole.predictions[self._begin : self._end]

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """See `NodeOutputs`."""
        return self.whole.top_ids[self._begin : self._end]

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """See `NodeOutputs`."""
        return self.whole.top_probabilities[self._begin : self._end]

    @property
    def logit_rows(self) -> NDArray[np.int64]:
        """Row of the logits after each node, `[nodes]`; -1 where nothing was read."""
        return self.whole.logit_rows[self._begin : self._end]

    def logits_after(self, node: int) -> torch.Tensor:
        """Logits of the token after `node`, `[1, vocabulary]` float32.

        Raises:
            KeyError: Nothing was read after it.
        """
        row = int(self.whole.logit_rows[self._begin + node])
        if row < 0:
            raise KeyError(node)
        logits = self.whole.logits
        logits = logits[row : row + 1] if len(logits) > 1 else logits
        return logits.to(torch.float32, copy=True) if self.whole.borrowed else logits


def pass_result(
    forest: Forest,
    logits: torch.Tensor,
    top_k: int,
    rows: NDArray[np.int64] | None = None,
    borrowed: bool = False,
    listed: torch.Tensor | None = None,
    predictions: NDArray[np.int64] | None = None,
) -> PassResult:
    """The result of one pass, given its logits.

    Args:
        forest: The trees that were run.
        logits: `[rows, vocabulary]`; float32 where `listed` is not given.
        top_k: Number of likeliest tokens to list after each node.
        rows: The row of `logits` for each of `forest.read_slots`; one after another if not given.
        borrowed: Whether the next pass overwrites `logits`.
        listed: What `pack_likeliest` made of `logits`, with `top_k` or more, where the pass did that.
        predictions: Likeliest token of each row of `logits`, if the model's engine selects it.
    """
    downloads = Downloads()
    read = forest.read_nodes
    reads_all = len(read) == len(forest.tokens)
    if rows is None and reads_all and (forest.is_plain or forest.rows == 1):
        logit_rows = forest.order if forest.is_plain else forest.slots
    else:
        logit_rows = np.full(len(forest.tokens), -1, dtype=np.int64)
        logit_rows[read] = np.arange(len(read)) if rows is None else rows
    if listed is None and logits.device.type == "cpu":
        here = _likeliest(logits, top_k)
        if borrowed and len(logits) > 1:  # the next pass may come before anybody asks
            here = here._replace(predictions=argmax(logits))
        if predictions is not None:
            here = here._replace(predictions=predictions)
        find = partial(_of_nodes, here, logit_rows, reads_all)
        return PassResult(forest, logits, logit_rows, find, borrowed, downloads)
    bring = downloads.add(pack_likeliest(logits, top_k) if listed is None else listed)

    def read_listed() -> Listed:
        return _of_nodes(unpack_likeliest(bring(), top_k), logit_rows, reads_all)

    return PassResult(forest, logits, logit_rows, read_listed, borrowed, downloads)


def _of_nodes(listed: Listed, rows: NDArray[np.int64], reads_all: bool) -> Listed:
    """The likeliest tokens after nodes, given the likeliest tokens of rows of logits and the row of each node."""
    if reads_all and len(rows) == len(listed.ids) == 1:
        return listed
    predictions = None if listed.predictions is None else _spread(listed.predictions, rows, -1, reads_all)
    ids = _spread(listed.ids, rows, -1, reads_all)
    return Listed(ids, _spread(listed.probabilities, rows, 0, reads_all), predictions)


def _spread(values: NDArray[Any], rows: NDArray[np.int64], unread: int, reads_all: bool) -> NDArray[Any]:
    """The value of the row of each node; `unread` where that is -1, which is nowhere if all nodes are read."""
    if not len(values):
        return np.full((len(rows), *values.shape[1:]), unread, dtype=values.dtype)
    of_nodes = values.take(rows, axis=0)  # of row -1 the last one
    if not reads_all:
        of_nodes[rows < 0] = unread
    return of_nodes


def pack_likeliest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Summary of the logits `[rows, vocabulary]`, in int32 `[rows, 1 + 2 * top_k]`: the likeliest token, the `top_k`
    likeliest ones, and the bits of their probabilities in float32."""
    top_k = min(top_k, logits.shape[-1])
    if logits.is_cuda and top_k and (list_largest := _kernel_for(logits.dtype, logits.device, top_k)) is not None:
        return list_largest(logits, top_k)
    parts = [logits.argmax(dim=-1, keepdim=True).int()]  # by torch, since it may be recorded
    if top_k:
        ids, probabilities = top_predictions(logits, top_k)
        parts += [ids.int(), probabilities.view(torch.int32)]
    return torch.cat(parts, dim=-1) if top_k else parts[0]


@cache
def _kernel_for(
    dtype: torch.dtype, device: torch.device, top_k: int
) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """The kernel that lists tokens in one read; `None` if it is not usable here."""
    if find_spec("triton") is None:
        return None
    from lookahead.backends import likeliest_kernel

    usable = top_k <= likeliest_kernel.MAX_LISTED and likeliest_kernel.lists_alike(dtype, device)
    return likeliest_kernel.list_largest if usable else None


def unpack_likeliest(packed: NDArray[np.int32], top_k: int) -> Listed:
    """The `top_k` likeliest tokens of what `pack_likeliest` packed, of each row."""
    listed = (packed.shape[1] - 1) // 2
    top_k = min(top_k, listed)
    ids = packed[:, 1 : 1 + top_k].astype(np.int64)
    probabilities = packed[:, 1 + listed : 1 + listed + top_k].copy()
    return Listed(ids, probabilities.view(np.float32), packed[:, 0].astype(np.int64))


def _likeliest(logits: torch.Tensor, top_k: int) -> Listed:
    """The `top_k` likeliest tokens of each row of logits on the CPU."""
    top_k = min(top_k, logits.shape[-1])
    if not top_k or not len(logits):
        shape = len(logits), top_k
        return Listed(np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32))
    ids, probabilities = top_predictions(logits, top_k)
    return Listed(ids.numpy(), probabilities.numpy())
