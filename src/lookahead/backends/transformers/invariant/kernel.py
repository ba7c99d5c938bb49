"""Invariant attention on the CPU: the result of a query depends only on the keys and values that it sees.

The order of each sum is fixed: scores over the head size from the first element to the last, and sums over keys by
position, regardless of their slots and of other queries.

LLVM may use vector instructions only if no bit changes, because it may neither reorder sums nor fuse a product with a
sum here. So the result of an element does not depend on its index. `fma` fuses products explicitly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

from lookahead.core.compiled import compiled, inner
from lookahead.core.tree_masks import BITS, FIRST, SCRATCH, VISIBLE, WORD

BLOCK = 64
"""Keys of a block."""
TILE = 16
"""Rows of a tile: query heads of nodes."""


def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c` of float32 numbers, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return numba.types.float32(numba.types.float32, numba.types.float32, numba.types.float32), generate


def _get(typing_context: Any, array: Any, index: Any) -> Any:
    """Return an element of a flat float32 array, without a bounds check."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]], inbounds=True))

    return numba.types.float32(array, numba.types.intp), generate


def _put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Set an element of a flat float32 array, without a bounds check."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]], inbounds=True))
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, numba.types.float32), generate


fma, get, put = map(intrinsic, (_fma, _get, _put))

_INFINITY = np.float32(np.inf)
_F0 = np.float32(0)
_F1 = np.float32(1)
_F2 = np.float32(2)
_LOWEST = np.float32(-86)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912)  # 1.5 * 2^23: adding and subtracting it rounds to a whole number
_C2 = np.float32(0.5)
_C3 = np.float32(1.6666665459e-1)
_C4 = np.float32(4.1665795894e-2)
_C5 = np.float32(8.3334519073e-3)
_C6 = np.float32(1.3981999507e-3)
_C7 = np.float32(1.9875691500e-4)


@compiled
def _exp(x: Any) -> Any:
    """Return e^x for x <= 0, to about a unit in the last place; 0 below -86."""
    clipped = max(x, _LOWEST)
    whole = fma(clipped, _LOG2_E, _ROUNDER) - _ROUNDER
    rest = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, clipped))
    series = fma(fma(fma(fma(fma(_C7, rest, _C6), rest, _C5), rest, _C4), rest, _C3), rest, _C2)
    power = fma(fma(series, rest, _F1), rest, _F1)
    scaled = power * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return scaled if x >= _LOWEST else _F0


@compiled
def _bend(x: Any, cap: Any) -> Any:
    """Return `cap * tanh(x / cap)`."""
    ratio = x / cap
    small = _exp(-_F2 * abs(ratio))
    bent = cap * ((_F1 - small) / (_F1 + small))
    return bent if ratio >= _F0 else -bent


@inner
def _number(which: Any, i: Any) -> Any:
    return i if which is None else which[i]


@inner
def _add_rows(factors: Any, rows: Any, which: Any, count: Any, sums: Any, many: Any) -> Any:
    """Add `count` rows, multiplied by their factors, to `many` sums, one row after another.

    Args:
        factors: Array, and index of the factor of the first row; the others follow.
        rows: Array, index of row 0, and distance of rows.
        which: Numbers of the rows; the first ones if `None`.
        count: Number of rows.
        sums: Array, and index of the first sum.
        many: Number of sums.
    """
    (of_factors, at), (of_rows, first, width), (of_sums, to) = factors, rows, sums
    whole = count - count % 4
    for i in range(0, whole, 4):
        a0 = get(of_factors, at + i)
        a1 = get(of_factors, at + i + 1)
        a2 = get(of_factors, at + i + 2)
        a3 = get(of_factors, at + i + 3)
        r0 = first + _number(which, i) * width
        r1 = first + _number(which, i + 1) * width
        r2 = first + _number(which, i + 2) * width
        r3 = first + _number(which, i + 3) * width
        for j in range(many):
            total = fma(a1, get(of_rows, r1 + j), fma(a0, get(of_rows, r0 + j), get(of_sums, to + j)))
            put(of_sums, to + j, fma(a3, get(of_rows, r3 + j), fma(a2, get(of_rows, r2 + j), total)))
    for i in range(whole, count):
        a0 = get(of_factors, at + i)
        r0 = first + _number(which, i) * width
        for j in range(many):
            put(of_sums, to + j, fma(a0, get(of_rows, r0 + j), get(of_sums, to + j)))


@compiled
def _find_keys(packed: Any, keys: Any) -> Any:
    """Write the numbers of the keys visible to a node to `keys`, by position, and return their count."""
    count = 0
    for key in range(packed[FIRST], packed[VISIBLE]):
        keys[count] = key
        count += 1
    for slot in range(WORD * (len(packed) - BITS)):
        if (packed[BITS + slot // WORD] >> (slot % WORD)) & 1:
            keys[count] = packed[SCRATCH] + slot
            count += 1
    return count


@compiled
def _turn(keys: Any, first: Any, count: Any, size: Any, turned: Any) -> Any:
    """Transpose the keys of a head within blocks, from `[count, size]` to `[blocks, size, BLOCK]`."""
    for start in range(0, count, BLOCK):
        for c in range(size):
            for j in range(min(BLOCK, count - start)):
                put(turned, start * size + c * BLOCK + j, get(keys, first + (start + j) * size + c))


@compiled
def _soften(weights: Any, at: Any, count: Any, scale: Any, cap: Any, lanes: Any) -> Any:
    """Replace scores by weights, the exponential of their difference from the maximum, and return the sum.

    `weights` has whole blocks. Each index of a block has its own lane, so that maxima and sums use vectors.
    """
    end = at + -(-count // BLOCK) * BLOCK
    for lane in range(BLOCK):
        put(lanes, lane, -_INFINITY)
    for start in range(at, end, BLOCK):
        for lane in range(BLOCK):
            score = get(weights, start + lane) * scale
            if cap > _F0:
                score = _bend(score, cap)
            score = score if start + lane < at + count else -_INFINITY
            put(weights, start + lane, score)
            put(lanes, lane, max(get(lanes, lane), score))
    highest = -_INFINITY
    total = _F0
    for lane in range(BLOCK):
        highest = max(highest, get(lanes, lane))
        put(lanes, lane, _F0)
    for start in range(at, end, BLOCK):
        for lane in range(BLOCK):
            weight = _exp(get(weights, start + lane) - highest)
            put(weights, start + lane, weight)
            put(lanes, lane, get(lanes, lane) + weight)
    for lane in range(BLOCK):
        total += get(lanes, lane)
    return total


@partial(compiled, releases_gil=True, makes_arrays=True)
def attend(states: Any, sizes: Any, packed: Any, numbers: Any, units: Any) -> Any:
    """Compute attention for some key-value heads; called by `attention.py`.

    Args:
        states: Flat float32 arrays: queries `[batch, kv heads, rows, size]` with the query heads of each node in turn
            as rows; keys `[batch, kv heads, keys, size]`; values `[batch, kv heads, keys, value size]`; and the output
            `[batch, kv heads, rows, value size]`.
        sizes: Number of kv heads, of query heads of each, of nodes and of keys; size and value size.
        packed: Packed masks `[batch, nodes, 3 + words]` int32 (`tree_attention`), possibly of only the last
            nodes. Each node sees itself.
        numbers: Scaling of scores and their soft limit (0 for none), float32.
        units: First and end of the kv heads, numbered over the batch.
    """
    queries, keys, values, output = states
    shared, group, nodes, count, size, width = sizes
    capacity = -(-count // BLOCK) * BLOCK
    turned = np.zeros(capacity * size, dtype=np.float32)
    weights = np.empty(TILE * capacity, dtype=np.float32)
    sums = np.empty(TILE * width, dtype=np.float32)
    lanes = np.empty(BLOCK, dtype=np.float32)
    seen = np.empty((TILE, capacity), np.intp)
    many_seen = np.empty(TILE, np.intp)
    totals = np.empty(TILE, np.float32)
    for unit in range(units[0], units[1]):
        _turn(keys, unit * count * size, count, size, turned)
        for tile in range(0, nodes * group, TILE):
            many = min(TILE, nodes * group - tile)
            start = unit * nodes * group + tile
            weights[:] = _F0
            sums[:] = _F0
            low = count
            high = 0
            for row in range(many):
                if row and (tile + row) % group:  # another head of the same node
                    many_seen[row] = many_seen[row - 1]
                    seen[row, : many_seen[row]] = seen[row - 1, : many_seen[row]]
                else:
                    many_seen[row] = _find_keys(packed[unit // shared, (tile + row) // group], seen[row])
                low = min(low, seen[row, 0])
                high = max(high, seen[row, many_seen[row] - 1] + 1)
            for at in range(low // BLOCK * BLOCK, high, BLOCK):
                for row in range(many):
                    query = (queries, (start + row) * size)
                    block = (turned, at * size, BLOCK)
                    _add_rows(query, block, None, size, (weights, row * capacity + at), BLOCK)
            for row in range(many):
                for place in range(many_seen[row]):
                    put(weights, row * capacity + place, get(weights, row * capacity + seen[row, place]))
                totals[row] = _soften(weights, row * capacity, many_seen[row], numbers[0], numbers[1], lanes)
            for at in range(0, high - low, BLOCK):
                for row in range(many):
                    factors = (weights, row * capacity + at)
                    rows = (values, unit * count * width, width)
                    some = max(min(BLOCK, many_seen[row] - at), 0)
                    _add_rows(factors, rows, seen[row, at:], some, (sums, row * width), width)
            for row in range(many):
                for c in range(width):
                    put(output, (start + row) * width + c, get(sums, row * width + c) / totals[row])
