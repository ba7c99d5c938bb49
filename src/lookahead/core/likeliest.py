"""Top-k tokens of rows of logits, with probabilities: a compiled loop that reads each row once.

A softmax over a vocabulary of 128,000 reads and writes the whole row several times. Here a row stays in the processor's
cache while the loop finds its maximum, the sum of its exponentials and its largest elements. Blocks of negligible
probability are left out of the sum.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, TypedLoop, compiled, inner

BLOCK = 128
"""Tokens per block; a row must have at least one whole block per listed token."""

_NEGLIGIBLE = np.float32(20.0)
"""Distance below the largest logit beyond which a block is ignored; at most 1/3000 of the sum for 128,000 tokens."""

_PER_LOG = np.float32(1.4426950408889634)
_LOWEST = np.float32(-126.0)
_BIAS = np.float32(127.0)
_MANTISSA = np.int32(23)
_P0 = np.float32(0.99999994)
_P1 = np.float32(0.69315308)
_P2 = np.float32(0.24015361)
_P3 = np.float32(0.055826318)
_P4 = np.float32(0.0089893397)
_P5 = np.float32(0.0018775767)
"""Polynomial for powers of two between 0 and 1 (minimax, relative error below one in a million)."""

_EXPONENT = np.int32(0x7F800000)
"""Exponent bits of float32; all of them are set only in infinities and NaN."""

_HALF = np.int32(16)
"""Bits that float32 has more than bfloat16."""

_compiled = partial(compiled, vectorizes=True)
_inner = partial(inner, vectorizes=True)


@_inner
def _exponential(logit: np.float32, top: np.float32) -> np.float32:
    """Return exp(logit - top) to six digits: powers of two from bits, the fraction by a polynomial."""
    power = max((logit - top) * _PER_LOG, _LOWEST)
    whole = np.floor(power)
    rest = power - whole
    value = _P0 + rest * (_P1 + rest * (_P2 + rest * (_P3 + rest * (_P4 + rest * _P5))))
    exponential: np.float32 = value * np.int32(np.int32(whole + _BIAS) << _MANTISSA).view(np.float32)
    return exponential


@_inner
def _sum_of_block(block: NDArray[np.float32], top: np.float32) -> float:
    """Return the sum of exp(logit - top). The block must be its own slice: loops with an offset are not vectorised."""
    total = np.float32(0.0)
    for index in range(BLOCK):
        total += _exponential(block[index], top)
    return float(total)


@_inner
def _largest(block: NDArray[np.float32]) -> np.float32:
    """Return the maximum of a block, as four interleaved maxima, because each comparison waits for the previous one."""
    first = block[0]
    second = block[1]
    third = block[2]
    fourth = block[3]
    for index in range(4, BLOCK, 4):
        first = max(first, block[index])
        second = max(second, block[index + 1])
        third = max(third, block[index + 2])
        fourth = max(fourth, block[index + 3])
    top: np.float32 = max(max(first, second), max(third, fourth))
    return top


@_inner
def _insert(token: int, value: np.float32, count: int, tokens: NDArray[np.int64], values: NDArray[np.float32]) -> int:
    """Insert into a descending list, behind equal values, dropping the last if full; return the new length."""
    at = min(count, len(values) - 1)
    if count == len(values) and not value > values[at]:
        return count
    while at > 0 and value > values[at - 1]:
        values[at] = values[at - 1]
        tokens[at] = tokens[at - 1]
        at -= 1
    values[at] = value
    tokens[at] = token
    return min(count + 1, len(values))


@_inner
def _list_row(
    row: NDArray[np.float32],
    maxima: NDArray[np.float32],
    blocks: NDArray[np.int64],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
) -> None:
    """`list_likeliest` for one row."""
    whole = len(maxima) * BLOCK
    count = FIRST
    for block in range(len(maxima)):
        largest = _largest(row[block * BLOCK : (block + 1) * BLOCK])
        maxima[block] = largest
        count = _insert(block, largest, count, blocks, values)
    top = values[0]
    for index in range(whole, len(row)):
        top = max(top, row[index])
    total = 0.0
    for index in range(whole, len(row)):
        total += _exponential(row[index], top)
    for block in range(len(maxima)):
        if maxima[block] > top - _NEGLIGIBLE:
            total += _sum_of_block(row[block * BLOCK : (block + 1) * BLOCK], top)
    bound = values[len(values) - 1]  # smallest listed block maximum: a lower bound for the listed tokens
    count = FIRST
    for rank in range(len(blocks)):
        begin = blocks[rank] * BLOCK
        for index in range(begin, begin + BLOCK):
            if row[index] >= bound:
                count = _insert(index, row[index], count, ids, probabilities)
    for index in range(whole, len(row)):
        count = _insert(index, row[index], count, ids, probabilities)
    for rank in range(len(ids)):
        share = np.float32(np.exp(probabilities[rank] - top) / total if total > 0.0 else 0.0)
        probabilities[rank] = share if share.view(np.int32) & _EXPONENT != _EXPONENT else np.float32(0.0)


@TypedLoop
@_compiled
def list_likeliest(
    logits: NDArray[np.float32],
    maxima: NDArray[np.float32],
    blocks: NDArray[np.int64],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
) -> None:
    """Write the likeliest tokens of each row, likeliest first, and their probabilities (softmax of the row).

    Args:
        logits: Logits, `[rows, vocabulary]`.
        maxima: Buffer for the maximum of each whole block, `[vocabulary // BLOCK]`, at least `listed`.
        blocks: Buffer for the blocks with the largest maxima, `[listed]`.
        values: Buffer for their maxima, `[listed]`.
        ids: Output for the tokens, `[rows, listed]`.
        probabilities: Output for their probabilities, `[rows, listed]`.
    """
    for row in range(len(logits)):
        _list_row(logits[row], maxima, blocks, values, ids[row], probabilities[row])


@TypedLoop
@_compiled
def list_likeliest_bits(
    bits: NDArray[np.int16],
    row: NDArray[np.float32],
    maxima: NDArray[np.float32],
    blocks: NDArray[np.int64],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
) -> None:
    """Run `list_likeliest` on logits in bfloat16, given as `bits`; `row` is a buffer, `[vocabulary]`."""
    for number in range(len(bits)):
        for index in range(bits.shape[1]):
            row[index] = np.int32(np.int32(bits[number, index]) << _HALF).view(np.float32)
        _list_row(row, maxima, blocks, values, ids[number], probabilities[number])
