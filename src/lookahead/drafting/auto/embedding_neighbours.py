"""Embedding neighbours: for a token that the memory does not know, it uses the entries of similar tokens.

Tokens whose rows of the model's input embedding are close often have similar continuations. Of the tokens that the
memory knows, those nearest to the last token of the context are used.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner
from lookahead.drafting.auto.ngram_entries import Entries, entry_after
from lookahead.drafting.auto.proposals import MOST_LISTED, UNLISTED_LOG, Nodes, Proposals, proposal_of, set_default
from lookahead.errors import InvalidArgumentError

COORDINATES = 128
"""Coordinates of an embedding that are kept: cosines of as many tell neighbours from strangers."""

NEAREST = 16
"""Neighbours of a token whose memory entries are read."""

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


class NeighbourArrays(NamedTuple):
    """The arrays of `EmbeddingNeighbours`, and room for the work at one node.

    Attributes:
        codes, lengths: Those of `EmbeddingNeighbours`.
        nearest, slots: Cosines and memory entries of the neighbours that are read, `[NEAREST]`.
        followers: Tokens that may follow, the likeliest first, `[NEAREST * top_k]`.
        shares: Their probabilities, likewise.
    """

    codes: NDArray[np.int8]
    lengths: NDArray[np.float32]
    nearest: NDArray[np.float64]
    slots: NDArray[np.int64]
    followers: NDArray[np.int64]
    shares: NDArray[np.float64]


def neighbour_arrays(neighbours: EmbeddingNeighbours | None, top_k: int) -> NeighbourArrays:
    """What compiled loops ask, with room for so many followers of each neighbour."""
    table = EmbeddingNeighbours(np.zeros((0, 0), dtype=np.float32)) if neighbours is None else neighbours
    slots, followers = (np.zeros(size, dtype=np.int64) for size in (NEAREST, NEAREST * top_k))
    return NeighbourArrays(table.codes, table.lengths, np.zeros(NEAREST), slots, followers, np.zeros(len(followers)))


@inner
def _find_nearest(token: int, known: NDArray[np.int64], neighbours: NeighbourArrays, entries: Entries) -> int:
    """Note the tokens of `known` nearest to `token` that the memory does know, the nearest first; returns how many."""
    codes, lengths, nearest, slots = neighbours.codes, neighbours.lengths, neighbours.nearest, neighbours.slots
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
        slot = entry_after(other, entries)
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
    return found


@compiled
def follow_neighbours(token: int, known: NDArray[np.int64], neighbours: NeighbourArrays, entries: Entries) -> int:
    """What the memory expects after the tokens nearest to `token`, blended: each counts exp(8 cosine).

    Args:
        token: The token that the memory does not know.
        known: Tokens that it may know.
        neighbours: Gets the tokens that may follow, and their probabilities.
        entries: The memory, whose contexts of one token are read.

    Returns:
        How many may follow; 0 if no neighbour is known.
    """
    if token >= len(neighbours.lengths) or neighbours.lengths[token] == 0:
        return 0
    found = _find_nearest(token, known, neighbours, entries)
    count = 0
    total = 0.0
    for index in range(found):
        weight = exp(_SHARPNESS * (neighbours.nearest[index] - neighbours.nearest[0]))
        total += weight
        slot = neighbours.slots[index]
        for rank in range(entries.ids.shape[1]):
            follower = int(entries.ids[slot, rank])
            if follower < 0:
                break
            share = weight * exp(float(entries.logs[slot, rank]))
            count = add_share(follower, share, count, neighbours.followers, neighbours.shares)
    rank_shares(count, total, neighbours.followers, neighbours.shares)
    return count


@inner
def propose_neighbours(
    node: int,
    known: NDArray[np.int64],
    nodes: Nodes,
    proposals: Proposals,
    neighbours: NeighbourArrays,
    entries: Entries,
    column: int,
) -> None:
    """Propose what follows the neighbours of a token that the memory does not know; `column` is the feature.

    For the other arguments see `follow_neighbours`.
    """
    count = min(follow_neighbours(nodes.tokens[node], known, neighbours, entries), MOST_LISTED)
    if count > 0:
        set_default(column, UNLISTED_LOG, proposals)
    for index in range(count):
        row = proposal_of(neighbours.followers[index], node, proposals)
        proposals.features[row, column] = max(log(neighbours.shares[index]), UNLISTED_LOG)


@inner
def add_share(token: int, share: float, count: int, followers: NDArray[np.int64], shares: NDArray[np.float64]) -> int:
    """Add to the share of a token among the first `count` followers; one that does not fit is left out.

    Returns:
        How many followers there are now.
    """
    place = 0
    while place < count and followers[place] != token:
        place += 1
    if place == len(followers):
        return count
    if place == count:
        followers[place] = token
        shares[place] = 0.0
        count += 1
    shares[place] += share
    return count


@inner
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
