"""Attention whose result for a query depends only on the keys and values that it sees.

Keys and values may lie in one run, or those of a tree's nodes anywhere behind the text; other queries may go along,
as many as like. A query's bits are the same, since each of its sums has an order of its own: scores over the head size
from the first element to the last, and everything over keys by position, whatever slots they lie in.

LLVM may turn a loop into vector instructions only where no bit of the result changes, since nothing here allows it to
reorder sums or to fuse a product with a sum. So what an element of an array becomes does not depend on its place.
Fused products are asked for one by one, with `fma`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from lookahead.backends.transformers.tree_attention.packed_mask import BITS, FIRST, SCRATCH, VISIBLE, WORD
from lookahead.core.compiled import compiled, inner

# By name, as neither has types.
_ir: Any = import_module("llvmlite.ir")
_types: Any = import_module("numba").types
_intrinsic: Any = import_module("numba.extending").intrinsic

BLOCK = 64
"""Keys that are gone through together."""
TILE = 16
"""Rows, query heads of nodes, that go through them together."""

_START, _STOP, _PLACE, _ROWS = range(4)
"""What is said of a run of keys."""
_ALL = np.uint32(0xFFFFFFFF)

_FLOAT = _ir.FloatType()


def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of float32 numbers, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return _types.float32(_types.float32, _types.float32, _types.float32), generate


def _as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 number whose bits are those of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return _types.float32(_types.int32), generate


def _get(typing_context: Any, array: Any, index: Any) -> Any:
    """An element of a flat float32 array. The index is not looked at, as in C: it must be inside."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]], inbounds=True))

    return _types.float32(array, _types.intp), generate


def _put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Set an element of a flat float32 array; as `get`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]], inbounds=True))
        return context.get_dummy_value()

    return _types.void(array, _types.intp, _types.float32), generate


fma, as_float, get, put = map(_intrinsic, (_fma, _as_float, _get, _put))

_INFINITY = np.float32(np.inf)
_F0, _F1, _F2 = np.float32(0), np.float32(1), np.float32(2)
_LOWEST, _LOG2_E = np.float32(-86), np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912)  # 1.5 * 2^23: adding and subtracting it rounds to a whole number
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)


def _exp(x: Any) -> Any:
    """e^x for x of at most 0, to about a unit in the last place; below -86 it is 0."""
    clipped = max(x, _LOWEST)
    whole = fma(clipped, _LOG2_E, _ROUNDER) - _ROUNDER
    rest = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, clipped))
    series = fma(fma(fma(fma(fma(_C7, rest, _C6), rest, _C5), rest, _C4), rest, _C3), rest, _C2)
    power = fma(fma(series, rest, _F1), rest, _F1)
    scaled = power * as_float((np.int32(whole) + np.int32(127)) << np.int32(23))
    return scaled if x >= _LOWEST else _F0


def _bend(x: Any, cap: Any) -> Any:
    """`cap * tanh(x / cap)`."""
    ratio = x / cap
    small = _exp(-_F2 * abs(ratio))
    bent = cap * ((_F1 - small) / (_F1 + small))
    return bent if ratio >= _F0 else -bent


_exp = compiled(_exp)
_bend = compiled(_bend)


def _add_rows(factors: Any, rows: Any, sums: Any, count: Any, many: Any) -> Any:
    """Add `count` rows with their factors to `many` sums, one row after another.

    Each of `factors`, `rows` and `sums` is an array, where it begins there, and how far apart things are in it: factors
    of different sums, rows, and sums of different factors, of which `_add_rows_to_four` has four.
    """
    (of_factors, at, _), (of_rows, first, width), (of_sums, to, _) = factors, rows, sums
    whole = count - count % 4
    for i in range(0, whole, 4):
        a, r = at + i, first + i * width
        a0, a1, a2, a3 = get(of_factors, a), get(of_factors, a + 1), get(of_factors, a + 2), get(of_factors, a + 3)
        for j in range(many):
            total = fma(a1, get(of_rows, r + width + j), fma(a0, get(of_rows, r + j), get(of_sums, to + j)))
            total = fma(a3, get(of_rows, r + 3 * width + j), fma(a2, get(of_rows, r + 2 * width + j), total))
            put(of_sums, to + j, total)
    for i in range(whole, count):
        a0, r = get(of_factors, at + i), first + i * width
        for j in range(many):
            put(of_sums, to + j, fma(a0, get(of_rows, r + j), get(of_sums, to + j)))


_add_rows = inner(_add_rows)


def _add_rows_to_four(factors: Any, rows: Any, sums: Any, count: Any, many: Any) -> Any:
    """The same four times, in half the time."""
    (of_factors, at, gap), (of_rows, first, width), (of_sums, to, step) = factors, rows, sums
    whole = count - count % 4
    for i in range(0, whole, 4):
        a, r = at + i, first + i * width
        b, d, e = a + gap, a + 2 * gap, a + 3 * gap
        a0, a1, a2, a3 = get(of_factors, a), get(of_factors, a + 1), get(of_factors, a + 2), get(of_factors, a + 3)
        b0, b1, b2, b3 = get(of_factors, b), get(of_factors, b + 1), get(of_factors, b + 2), get(of_factors, b + 3)
        d0, d1, d2, d3 = get(of_factors, d), get(of_factors, d + 1), get(of_factors, d + 2), get(of_factors, d + 3)
        e0, e1, e2, e3 = get(of_factors, e), get(of_factors, e + 1), get(of_factors, e + 2), get(of_factors, e + 3)
        for j in range(many):
            r0, r1 = get(of_rows, r + j), get(of_rows, r + width + j)
            r2, r3 = get(of_rows, r + 2 * width + j), get(of_rows, r + 3 * width + j)
            s = to + j
            put(of_sums, s, fma(a3, r3, fma(a2, r2, fma(a1, r1, fma(a0, r0, get(of_sums, s))))))
            s += step
            put(of_sums, s, fma(b3, r3, fma(b2, r2, fma(b1, r1, fma(b0, r0, get(of_sums, s))))))
            s += step
            put(of_sums, s, fma(d3, r3, fma(d2, r2, fma(d1, r1, fma(d0, r0, get(of_sums, s))))))
            s += step
            put(of_sums, s, fma(e3, r3, fma(e2, r2, fma(e1, r1, fma(e0, r0, get(of_sums, s))))))
    for which in range(4 if whole < count else 0):
        rest, below = (of_factors, at + which * gap + whole, gap), (of_rows, first + whole * width, width)
        _add_rows(rest, below, (of_sums, to + which * step, step), count - whole, many)


_add_rows_to_four = inner(_add_rows_to_four)


def _find_runs(packed: Any, runs: Any) -> Any:
    """What a node sees, in the order of positions, as runs of keys: `_START`, `_STOP`, and the first one's `_PLACE` in
    that order. How many runs there are."""
    runs[0, _START], runs[0, _STOP], runs[0, _PLACE] = packed[FIRST], max(packed[VISIBLE], packed[FIRST]), 0
    count, place = 1, runs[0, _STOP] - runs[0, _START]
    for word in range(len(packed) - BITS):
        bits = np.uint32(packed[BITS + word])
        bit = 0
        while bit < WORD and bits >> np.uint32(bit):
            many = WORD if bits == _ALL else 1
            if (bits >> np.uint32(bit)) & np.uint32(1):
                key = packed[SCRATCH] + word * WORD + bit
                if count == 1 or runs[count - 1, _STOP] != key:
                    runs[count, _START], runs[count, _PLACE] = key, place
                    count += 1
                runs[count - 1, _STOP] = key + many
                place += many
            bit += many
    return count


def _mark_fours(runs: Any, counts: Any, many: Any) -> Any:
    """Say of each run for how many rows it counts: of four rows the first runs, as far as they are the same, count for
    all of them in that of the first row."""
    for row in range(many):
        for run in range(counts[row]):
            runs[row, run, _ROWS] = 1
    for row in range(0, many - 3, 4):
        run, alike = 0, True
        while alike and run < counts[row : row + 4].min():
            for other in range(row + 1, row + 4):
                for part in range(_ROWS):
                    alike = alike and runs[row, run, part] == runs[other, run, part]
            if alike:
                runs[row + 1 : row + 4, run, _ROWS] = 0
                runs[row, run, _ROWS] = 4
            run += 1


def _turn(keys: Any, first: Any, count: Any, size: Any, turned: Any) -> Any:
    """The keys of a head, `[count, size]`, so that those of a block lie in columns: `[blocks, size, BLOCK]`."""
    for start in range(0, count, BLOCK):
        for c in range(size):
            for j in range(min(BLOCK, count - start)):
                put(turned, start * size + c * BLOCK + j, get(keys, first + (start + j) * size + c))


def _soften(weights: Any, at: Any, count: Any, scale: Any, cap: Any, lanes: Any) -> Any:
    """Scores to weights, the exponential of how far each is below the highest; their sum. There is room for whole
    blocks."""
    end = at + -(-count // BLOCK) * BLOCK
    for j in range(at, at + count):
        put(weights, j, get(weights, j) * scale)
    if cap > _F0:
        for j in range(at, at + count):
            put(weights, j, _bend(get(weights, j), cap))
    for j in range(at + count, end):
        put(weights, j, -_INFINITY)
    for lane in range(BLOCK):
        put(lanes, lane, -_INFINITY)
    for start in range(at, end, BLOCK):
        for lane in range(BLOCK):
            put(lanes, lane, max(get(lanes, lane), get(weights, start + lane)))
    highest, total = -_INFINITY, _F0
    for lane in range(BLOCK):
        highest = max(highest, get(lanes, lane))
        put(lanes, lane, _F0)
    for j in range(at, end):
        put(weights, j, _exp(get(weights, j) - highest))
    for start in range(at, end, BLOCK):
        for lane in range(BLOCK):
            put(lanes, lane, get(lanes, lane) + get(weights, start + lane))
    for lane in range(BLOCK):
        total += get(lanes, lane)
    return total


_find_runs = compiled(_find_runs)
_mark_fours = compiled(_mark_fours, makes_arrays=True)
_turn = compiled(_turn)
_soften = compiled(_soften)


def _score(queries: Any, turned: Any, weights: Any, block: Any, runs: Any) -> Any:
    """Add the products of a row, or four of them, with the keys of a block to its scores, which lie by place.

    Each array comes with where the row's part of it begins, and how far behind that of the next row does; so below.
    """
    size = queries[2]
    of_weights, to, room = weights
    for run in range(len(runs)):
        low, high = max(runs[run, _START], block * BLOCK), min(runs[run, _STOP], block * BLOCK + BLOCK)
        keys = turned, block * (size - 1) * BLOCK + low, BLOCK
        scores = of_weights, to + runs[run, _PLACE] + low - runs[run, _START], room
        if low < high and runs[run, _ROWS] == 4:
            _add_rows_to_four(queries, keys, scores, size, high - low)
        elif low < high and runs[run, _ROWS] == 1:
            _add_rows(queries, keys, scores, size, high - low)


def _sum(weights: Any, values: Any, sums: Any, block: Any, runs: Any) -> Any:
    """Add the values of a block, with their weights, to the sums of a row, or of four of them."""
    of_weights, at, room = weights
    of_values, start, width = values
    for run in range(len(runs)):
        low, high = max(runs[run, _START], block * BLOCK), min(runs[run, _STOP], block * BLOCK + BLOCK)
        factors = of_weights, at + runs[run, _PLACE] + low - runs[run, _START], room
        rows = of_values, start + low * width, width
        if low < high and runs[run, _ROWS] == 4:
            _add_rows_to_four(factors, rows, sums, high - low, width)
        elif low < high and runs[run, _ROWS] == 1:
            _add_rows(factors, rows, sums, high - low, width)


_score = inner(_score)
_sum = inner(_sum)


def _attend(states: Any, sizes: Any, packed: Any, numbers: Any, units: Any) -> Any:
    """The attention of some heads; `attention.py` alone calls it.

    Args:
        states: Flat arrays of float32: queries `[batch, heads of keys, rows, size]`, where rows are the query heads of
            a head of keys, node after node; keys `[batch, heads of keys, keys, size]`; values `[batch, heads of keys,
            keys, value size]`; and the output `[batch, heads of keys, rows, value size]`.
        sizes: heads of keys, query heads of each, nodes, keys, size, value size.
        packed: `[batch, nodes, 3 + words]` int32, see `tree_attention.packed_mask`; of the last nodes of a pass alone,
            in layers that nobody asks about the others. Each node sees itself at least.
        numbers: What scores are multiplied by, and what they are bent to stay below (0 for nothing), float32.
        units: Which heads of keys of which rows of the batch, counted through: first and end.
    """
    queries, keys, values, output = states
    shared, group, nodes, count, size, width = sizes
    blocks = -(-count // BLOCK)
    room = (blocks + 1) * BLOCK
    turned = np.empty(blocks * size * BLOCK, dtype=np.float32)
    weights = np.empty(TILE * room, dtype=np.float32)
    sums, lanes = np.empty(TILE * width, dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    runs = np.empty((TILE, 2 + WORD * (packed.shape[2] - BITS), 4), dtype=np.intp)
    counts, totals = np.empty(TILE, dtype=np.intp), np.empty(TILE, dtype=np.float32)
    for unit in range(units[0], units[1]):
        _turn(keys, unit * count * size, count, size, turned)
        for tile in range(0, nodes * group, TILE):
            many, start = min(TILE, nodes * group - tile), unit * nodes * group + tile
            weights[:] = _F0
            sums[:] = _F0
            for row in range(many):
                if row and (tile + row) % group:  # another head of the same node
                    counts[row] = counts[row - 1]
                    runs[row, : counts[row]] = runs[row - 1, : counts[row]]
                else:
                    counts[row] = _find_runs(packed[unit // shared, (tile + row) // group], runs[row])
            _mark_fours(runs, counts, many)
            for block in range(blocks):
                for row in range(many):
                    query, scores = (queries, (start + row) * size, size), (weights, row * room, room)
                    _score(query, turned, scores, block, runs[row, : counts[row]])
            for row in range(many):
                last = runs[row, counts[row] - 1]
                seen = last[_PLACE] + last[_STOP] - last[_START]
                totals[row] = _soften(weights, row * room, seen, numbers[0], numbers[1], lanes)
            for block in range(blocks):
                for row in range(many):
                    factors, rows = (weights, row * room, room), (values, unit * count * width, width)
                    _sum(factors, rows, (sums, row * width, width), block, runs[row, : counts[row]])
            for row in range(many):
                for c in range(width):
                    put(output, (start + row) * width + c, get(sums, row * width + c) / totals[row])


attend: Any = compiled(_attend, releases_gil=True, makes_arrays=True)
