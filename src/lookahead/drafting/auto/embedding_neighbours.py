"""Tokens that resemble each other: after one that was never seen may follow what follows its neighbours.

The model's own input embedding says which tokens it treats alike. A memory that has not met a context yet can
therefore borrow: from the tokens nearest to its last one, of those that it has met.
"""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.ngram_memory import FIRST_FACTOR, FIRST_PRIME, SECOND_FACTOR, SECOND_PRIME, entry_of
from lookahead.drafting.compiled import compiled
from lookahead.errors import InvalidArgumentError

COORDINATES = 128
"""Coordinates of an embedding that are kept: cosines of as many tell neighbours from strangers."""

NEAREST = 16
"""EmbeddingNeighbours that are asked."""

_SHARPNESS = 8.0
_RANGE = 127
_CHUNK = 512


class EmbeddingNeighbours:
    """Where tokens lie: rows of an embedding in 8 bits, with the mean of all tokens taken away.

    A token takes one byte for each coordinate and 4 more, 132 for the usual 128 coordinates: 17 MB for a vocabulary of
    128,000. The arrays are open to the inner loops of drafting.

    Attributes:
        codes: `[tokens, coordinates]` int8, each row scaled to its own range.
        lengths: Euclidean length of each row of `codes`, `[tokens]` float32; 0 for a row that is no direction.

    Args:
        rows: Some coordinates of the embedding of every token, `[tokens, coordinates]` float32.

    Raises:
        InvalidArgumentError: `rows` is not two-dimensional.
    """

    def __init__(self, rows: NDArray[np.float32]) -> None:
        if rows.ndim != 2:
            raise InvalidArgumentError(f"rows of shape {rows.shape} are no embedding; it must be [tokens, coordinates]")
        self.codes = np.zeros(rows.shape, dtype=np.int8)
        self.lengths = np.zeros(len(rows), dtype=np.float32)
        if not rows.size:
            return
        mean = rows.mean(axis=0)
        for begin in range(0, len(rows), _CHUNK):  # a chunk stays in the processor's cache
            part = slice(begin, begin + _CHUNK)
            centred = np.nan_to_num(rows[part] - mean, copy=False)
            largest = np.abs(centred).max(axis=1, keepdims=True)
            centred *= np.divide(_RANGE, largest, out=np.zeros_like(largest), where=largest > 0)
            np.rint(centred, out=centred)
            self.codes[part] = centred
            self.lengths[part] = np.sqrt(np.einsum("ij,ij->i", centred, centred))

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        return int(self.codes.nbytes + self.lengths.nbytes)


@compiled
def follow_neighbours(
    token: int,
    known: NDArray[np.int64],
    codes: NDArray[np.int8],
    lengths: NDArray[np.float32],
    tags: NDArray[np.int64],
    ids: NDArray[np.int32],
    logs: NDArray[np.float32],
    sets: int,
    nearest: NDArray[np.float64],
    slots: NDArray[np.int64],
    followers: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> int:
    """What the memory expects after the tokens nearest to `token`, blended: each counts exp(8 cosine).

    Args:
        token: The token that the memory does not know.
        known: Tokens that it may know.
        codes, lengths: Those of `EmbeddingNeighbours`.
        tags, ids, logs, sets: Those of `NGramMemory`, whose contexts of one token are read.
        nearest, slots: Room for the neighbours, `[NEAREST]`.
        followers: Gets the tokens that may follow, the likeliest first, `[NEAREST * top_k]`.
        shares: Gets their probabilities, likewise.

    Returns:
        How many may follow; 0 if no neighbour is known.
    """
    if token >= len(lengths) or lengths[token] == 0:
        return 0
    found = 0
    for index in range(len(known)):
        other = known[index]
        if other == token or other >= len(lengths) or lengths[other] == 0:
            continue
        product = 0
        for column in range(codes.shape[1]):
            product += int(codes[token, column]) * int(codes[other, column])
        cosine = product / (lengths[token] * lengths[other])
        if found == len(nearest) and cosine <= nearest[found - 1]:
            continue
        first = (FIRST_FACTOR + other + 1) % FIRST_PRIME
        slot = entry_of(first, (SECOND_FACTOR + other + 1) % SECOND_PRIME, 0, sets, tags)
        if slot < 0:
            continue
        if found < len(nearest):
            found += 1
        at = found - 1
        while at > 0 and cosine > nearest[at - 1]:
            nearest[at] = nearest[at - 1]
            slots[at] = slots[at - 1]
            at -= 1
        nearest[at] = cosine
        slots[at] = slot
    count = 0
    total = 0.0
    for index in range(found):
        weight = exp(_SHARPNESS * (nearest[index] - nearest[0]))
        total += weight
        count = add_shares(slots[index], weight, ids, logs, True, count, followers, shares)
    rank_shares(count, total, followers, shares)
    return count


@compiled
def add_shares(
    row: int,
    weight: float,
    ids: NDArray[np.signedinteger[Any]],
    values: NDArray[np.float32],
    are_logs: bool,
    count: int,
    followers: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> int:
    """Add `weight` times the probabilities of the tokens in a row to the shares of the first `count` followers.

    Args:
        row, ids, values: The tokens `ids[row]`, -1 where there are no more, and their probabilities or logarithms.
        weight: See there.
        are_logs: Whether `values` are logarithms.
        count: How many followers there are.
        followers, shares: Tokens and their shares; those that do not fit are left out.

    Returns:
        How many followers there are now.
    """
    for rank in range(ids.shape[1]):
        token = ids[row, rank]
        if token < 0:
            break
        place = 0
        while place < count and followers[place] != token:
            place += 1
        if place == len(followers):
            break
        if place == count:
            followers[place] = token
            shares[place] = 0.0
            count += 1
        value = float(values[row, rank])
        shares[place] += weight * (exp(value) if are_logs else value)
    return count


@compiled
def rank_shares(count: int, total: float, followers: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    """Put the first `count` followers in the order of their shares of `total`, the largest first."""
    for index in range(count):
        token = followers[index]
        share = shares[index] / total
        at = index
        while at > 0 and share > shares[at - 1]:
            followers[at] = followers[at - 1]
            shares[at] = shares[at - 1]
            at -= 1
        followers[at] = token
        shares[at] = share
