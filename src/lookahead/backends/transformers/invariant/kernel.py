"""Attention whose result for a query depends only on the keys and values that it sees.

Keys and values may lie in one run, or those of a tree's nodes anywhere behind the text; other queries may go along,
as many as like. A query's bits are the same, since each of its sums has an order of its own: scores over the head size
from the first element to the last, and everything over keys by position, whatever slots they lie in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lookahead.backends.transformers.invariant.machine import as_float, fma, get, put, read, rounded, write
from lookahead.backends.transformers.tree_attention.packed_mask import BITS, FIRST, SCRATCH, VISIBLE, WORD
from lookahead.core.compiled import compiled

BLOCK = 64
"""Keys in a block of scores."""
TILE = 16
"""Rows, query heads of nodes, that go through the keys together."""
WIDEST = 256
"""Elements of a value that are summed at a time."""

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


def _widen(room: Any, addresses: Any, kinds: Any, strides: Any, sizes: Any, b: Any, head: Any) -> Any:
    """Keys and values of a head to `room`, both float32."""
    key, value = (b * strides[1][0] + head * strides[1][1]), (b * strides[2][0] + head * strides[2][1])
    key_stride, value_stride = strides[1][2], strides[2][2]
    _, _, _, count, size, value_size = sizes
    padded, turned, wide = -(-size // 4) * 4, room.turned, room.wide
    for block in range(-(-count // BLOCK)):
        first = block * BLOCK
        start = first * padded
        for c in range(size):  # whole lines are written, so this order is faster
            for j in range(min(BLOCK, count - first)):
                put(turned, start + c * BLOCK + j, read(addresses[1], kinds[1], key + (first + j) * key_stride + c))
        for c in range(size, padded):
            for j in range(BLOCK):
                put(turned, start + c * BLOCK + j, _F0)
    for j in range(count):
        for c in range(value_size):
            put(wide, j * value_size + c, read(addresses[2], kinds[2], value + j * value_stride + c))


_widen = compiled(_widen)


def _score_block(queries: Any, turned: Any, block: Any, padded: Any, rows: Any, scores: Any) -> Any:
    """Products of `rows` queries, a multiple of 4, with the keys of a block, to `scores` `[blocks, TILE, BLOCK]`."""
    for row in range(0, rows, 4):
        to = (block * TILE + row) * BLOCK
        for j in range(4 * BLOCK):
            put(scores, to + j, _F0)
        for c in range(0, padded, 4):
            key = (block * padded + c) * BLOCK
            a, b, d, e = row * padded + c, (row + 1) * padded + c, (row + 2) * padded + c, (row + 3) * padded + c
            a0, a1, a2, a3 = get(queries, a), get(queries, a + 1), get(queries, a + 2), get(queries, a + 3)
            b0, b1, b2, b3 = get(queries, b), get(queries, b + 1), get(queries, b + 2), get(queries, b + 3)
            d0, d1, d2, d3 = get(queries, d), get(queries, d + 1), get(queries, d + 2), get(queries, d + 3)
            e0, e1, e2, e3 = get(queries, e), get(queries, e + 1), get(queries, e + 2), get(queries, e + 3)
            for j in range(BLOCK):
                k0, k1 = get(turned, key + j), get(turned, key + BLOCK + j)
                k2, k3 = get(turned, key + 2 * BLOCK + j), get(turned, key + 3 * BLOCK + j)
                at = to + j
                put(scores, at, fma(a3, k3, fma(a2, k2, fma(a1, k1, fma(a0, k0, get(scores, at))))))
                at += BLOCK
                put(scores, at, fma(b3, k3, fma(b2, k2, fma(b1, k1, fma(b0, k0, get(scores, at))))))
                at += BLOCK
                put(scores, at, fma(d3, k3, fma(d2, k2, fma(d1, k1, fma(d0, k0, get(scores, at))))))
                at += BLOCK
                put(scores, at, fma(e3, k3, fma(e2, k2, fma(e1, k1, fma(e0, k0, get(scores, at))))))


_score_block = compiled(_score_block)


def _weigh(scores: Any, row: Any, sees: Any, slots: Any, numbers: Any, kind: Any, weights: Any) -> Any:
    """A row's scores by position to `weights`, and through the exponential; their sum.

    Of the text it sees the positions `sees`, from the first to the second, then what lies at `slots`. The weights are
    rounded to the type of the values, which `kind` is one of, as torch does it; their sum is not.
    """
    (first, seen), (scale, softcap) = sees, numbers
    end = seen + len(slots)
    begin, stop = first - first % BLOCK, -(-end // BLOCK) * BLOCK
    for j in range(begin, first):
        put(weights, j, -_INFINITY)
    for j in range(end, stop):
        put(weights, j, -_INFINITY)
    for start in range(first - first % BLOCK, seen, BLOCK):
        source = (start // BLOCK * TILE + row) * BLOCK - start
        for j in range(max(start, first), min(start + BLOCK, seen)):
            put(weights, j, get(scores, source + j) * scale)
    for i in range(len(slots)):
        slot = slots[i]
        put(weights, seen + i, get(scores, (slot // BLOCK * TILE + row) * BLOCK + slot % BLOCK) * scale)
    if softcap > _F0:
        for j in range(first, end):
            put(weights, j, _bend(get(weights, j), softcap))
    lanes = np.full(BLOCK, -_INFINITY, dtype=np.float32)
    for start in range(begin, stop, BLOCK):
        for lane in range(BLOCK):
            put(lanes, lane, max(get(lanes, lane), get(weights, start + lane)))
    highest = lanes.max()
    for j in range(begin, stop):
        put(weights, j, _exp(get(weights, j) - highest))
    lanes[:] = _F0
    for start in range(begin, stop, BLOCK):
        for lane in range(BLOCK):
            put(lanes, lane, get(lanes, lane) + get(weights, start + lane))
    for j in range(begin, stop):
        put(weights, j, rounded(get(weights, j), kind))
    half = BLOCK // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


_weigh = compiled(_weigh, makes_arrays=True)


def _sum_four(weights: Any, stride: Any, count: Any, values: Any, value_size: Any, width: Any, sums: Any) -> Any:
    """Add the values of `count` positions to the sums of four rows, one position after another; the weights of a row
    lie `stride` behind those of the row before."""
    whole = count - count % 4
    a, b, d, e = 0, stride, 2 * stride, 3 * stride
    for j in range(0, whole, 4):
        a0, a1, a2, a3 = get(weights, a + j), get(weights, a + j + 1), get(weights, a + j + 2), get(weights, a + j + 3)
        b0, b1, b2, b3 = get(weights, b + j), get(weights, b + j + 1), get(weights, b + j + 2), get(weights, b + j + 3)
        d0, d1, d2, d3 = get(weights, d + j), get(weights, d + j + 1), get(weights, d + j + 2), get(weights, d + j + 3)
        e0, e1, e2, e3 = get(weights, e + j), get(weights, e + j + 1), get(weights, e + j + 2), get(weights, e + j + 3)
        v = j * value_size
        for c in range(width):
            v0, v1 = get(values, v + c), get(values, v + value_size + c)
            v2, v3 = get(values, v + 2 * value_size + c), get(values, v + 3 * value_size + c)
            put(sums, c, fma(a3, v3, fma(a2, v2, fma(a1, v1, fma(a0, v0, get(sums, c))))))
            to = c + WIDEST
            put(sums, to, fma(b3, v3, fma(b2, v2, fma(b1, v1, fma(b0, v0, get(sums, to))))))
            to = c + 2 * WIDEST
            put(sums, to, fma(d3, v3, fma(d2, v2, fma(d1, v1, fma(d0, v0, get(sums, to))))))
            to = c + 3 * WIDEST
            put(sums, to, fma(e3, v3, fma(e2, v2, fma(e1, v1, fma(e0, v0, get(sums, to))))))
    for j in range(whole, count):
        w0, w1, w2, w3 = get(weights, a + j), get(weights, b + j), get(weights, d + j), get(weights, e + j)
        for c in range(width):
            v0 = get(values, j * value_size + c)
            put(sums, c, fma(w0, v0, get(sums, c)))
            put(sums, c + WIDEST, fma(w1, v0, get(sums, c + WIDEST)))
            put(sums, c + 2 * WIDEST, fma(w2, v0, get(sums, c + 2 * WIDEST)))
            put(sums, c + 3 * WIDEST, fma(w3, v0, get(sums, c + 3 * WIDEST)))


def _sum_places(weights: Any, places: Any, values: Any, value_size: Any, width: Any, sums: Any) -> Any:
    """Add the values at `places` to the sums of a row, one after another, with their weights."""
    whole = len(places) - len(places) % 4
    for i in range(0, whole, 4):
        p0, p1 = np.intp(places[i]) * value_size, np.intp(places[i + 1]) * value_size
        p2, p3 = np.intp(places[i + 2]) * value_size, np.intp(places[i + 3]) * value_size
        w0, w1 = get(weights, i), get(weights, i + 1)
        w2, w3 = get(weights, i + 2), get(weights, i + 3)
        for c in range(width):
            total = fma(w1, get(values, p1 + c), fma(w0, get(values, p0 + c), get(sums, c)))
            put(sums, c, fma(w3, get(values, p3 + c), fma(w2, get(values, p2 + c), total)))
    for i in range(whole, len(places)):
        p0, w0 = np.intp(places[i]) * value_size, get(weights, i)
        for c in range(width):
            put(sums, c, fma(w0, get(values, p0 + c), get(sums, c)))


_sum_four = compiled(_sum_four)
_sum_places = compiled(_sum_places)


def _slots_of(packed: Any, start: Any, slots: Any) -> Any:
    """The keys at which the nodes that a node sees lie, to `slots`; how many there are."""
    count = 0
    for word in range(len(packed) - BITS):
        bits = np.uint32(packed[BITS + word])
        if bits != 0:
            for bit in range(32):
                if (bits >> np.uint32(bit)) & np.uint32(1):
                    slots[count] = start + word * 32 + bit
                    count += 1
    return count


_slots_of = compiled(_slots_of)


class _Room(NamedTuple):
    """Working memory of a call, and what its rows see.

    Attributes:
        turned: Keys of a head, `[blocks, padded size, BLOCK]`.
        wide: Its values, `[keys, value size]`.
        rows: Queries, `[TILE, padded size]`; rows are the heads of a node, node after node.
        scores: `[blocks, TILE, BLOCK]`, by place.
        weights: `[TILE, (blocks + 1) * BLOCK]`, by position.
        sums: `[TILE, WIDEST]`.
        totals: Sum of the weights of each row.
        places: All keys, in order.
        slots: The keys of nodes that each row sees, and how many there are; the text that it sees, from `firsts` to
            `seens`.
    """

    turned: Any
    wide: Any
    rows: Any
    scores: Any
    weights: Any
    sums: Any
    totals: Any
    places: Any
    slots: Any
    counts: Any
    firsts: Any
    seens: Any


def _take_rows(room: Any, addresses: Any, kinds: Any, strides: Any, sizes: Any, packed: Any, at: Any) -> Any:
    """The queries of a tile, and what they see; `at` is the row of the batch, the head of keys, first row and rows."""
    heads, shared, _, _, size, _ = sizes
    b, head, tile, many = at
    group, padded = heads // shared, -(-size // 4) * 4
    for row in range(many):
        node, which = (tile + row) // group, head * group + (tile + row) % group
        start = b * strides[0][0] + which * strides[0][1] + node * strides[0][2]
        for c in range(size):
            put(room.rows, row * padded + c, read(addresses[0], kinds[0], start + c))
        mask = packed[b, 0, node]
        if row == 0 or (tile + row) % group == 0:
            room.counts[row] = _slots_of(mask, mask[SCRATCH], room.slots[row])
        else:
            room.counts[row] = room.counts[row - 1]
            room.slots[row, : room.counts[row]] = room.slots[row - 1, : room.counts[row]]
        room.firsts[row], room.seens[row] = mask[FIRST], max(mask[VISIBLE], mask[FIRST])


def _weigh_tile(room: Any, sizes: Any, many: Any, numbers: Any, kind: Any) -> Any:
    """Scores and weights of the rows of a tile."""
    padded, blocks = -(-sizes[4] // 4) * 4, -(-sizes[3] // BLOCK)
    for block in range(blocks):
        start, end = block * BLOCK, (block + 1) * BLOCK
        asking = many  # rows up to the last one that sees some of the block
        while asking:
            last = asking - 1
            slots = room.slots[last]
            in_text = room.firsts[last] < end and start < room.seens[last]
            if in_text or (slots[0] < end and start <= slots[room.counts[last] - 1]):
                break
            asking -= 1
        if asking:
            _score_block(room.rows, room.turned, block, padded, -(-asking // 4) * 4, room.scores)
    for row in range(many):
        slots = room.slots[row, : room.counts[row]]
        weights = room.weights[row * (blocks + 1) * BLOCK :]
        sees = room.firsts[row], room.seens[row]
        room.totals[row] = _weigh(room.scores, row, sees, slots, numbers, kind, weights)


def _sum_tile(room: Any, sizes: Any, many: Any, piece: Any, width: Any) -> Any:
    """Sums of the values of the rows of a tile, `width` elements from `piece` on."""
    value_size, stride = sizes[5], (-(-sizes[3] // BLOCK) + 1) * BLOCK
    values, firsts, seens = room.wide[piece:], room.firsts, room.seens
    room.sums[:] = _F0
    for row in range(0, many, 4):
        rows = range(row, min(row + 4, many))
        alike = row + 4 <= many
        for other in rows:
            alike = alike and firsts[other] == firsts[row] and seens[other] == seens[row]
        if alike:
            weights, sums = room.weights[row * stride + firsts[row] :], room.sums[row * WIDEST :]
            first = values[firsts[row] * value_size :]
            _sum_four(weights, stride, seens[row] - firsts[row], first, value_size, width, sums)
        for other in rows:
            weights, sums = room.weights[other * stride :], room.sums[other * WIDEST :]
            if not alike:
                places = room.places[firsts[other] : seens[other]]
                _sum_places(weights[firsts[other] :], places, values, value_size, width, sums)
            places = room.slots[other, : room.counts[other]]
            _sum_places(weights[seens[other] :], places, values, value_size, width, sums)


_take_rows = compiled(_take_rows, makes_arrays=True)
_weigh_tile = compiled(_weigh_tile, makes_arrays=True)
_sum_tile = compiled(_sum_tile, makes_arrays=True)


def _attend(addresses: Any, kinds: Any, strides: Any, sizes: Any, packed: Any, numbers: Any, units: Any) -> Any:
    """The attention of some heads; `attention.py` alone calls it.

    Args:
        addresses: Of query, keys and values, and of the output `[batch, nodes, heads, value size]` float32.
        kinds: Of query, keys and values, see `machine.read`.
        strides: Of query, keys and values: row, head and node or key of each; elements of a head lie side by side.
        sizes: heads, heads of keys, nodes, keys, size, value size.
        packed: `[batch, 1, nodes, 3 + words]` int32, see `tree_attention.packed_mask`; of the last nodes of a pass
            alone, in layers that nobody asks about the others. Each node sees itself at least.
        numbers: What scores are multiplied by, and what they are bent to stay below (0 for nothing), float32.
        units: Which heads of keys of which rows, counted through: first and end.
    """
    heads, shared, nodes, count, size, value_size = sizes
    group, padded, blocks = heads // shared, -(-size // 4) * 4, -(-count // BLOCK)
    room = _Room(
        np.empty(blocks * padded * BLOCK, dtype=np.float32),
        np.empty(count * value_size, dtype=np.float32),
        np.zeros(TILE * padded, dtype=np.float32),
        np.empty(blocks * TILE * BLOCK, dtype=np.float32),
        np.empty(TILE * (blocks + 1) * BLOCK, dtype=np.float32),
        np.empty(TILE * WIDEST, dtype=np.float32),
        np.empty(TILE, dtype=np.float32),
        np.arange(count).astype(np.int32),
        np.empty((TILE, WORD * (packed.shape[3] - BITS)), dtype=np.int32),
        np.empty(TILE, dtype=np.intp),
        np.empty(TILE, dtype=np.intp),
        np.empty(TILE, dtype=np.intp),
    )
    for unit in range(units[0], units[1]):
        b, head = unit // shared, unit % shared
        _widen(room, addresses, kinds, strides, sizes, b, head)
        for tile in range(0, nodes * group, TILE):
            many = min(TILE, nodes * group - tile)
            _take_rows(room, addresses, kinds, strides, sizes, packed, (b, head, tile, many))
            _weigh_tile(room, sizes, many, numbers, kinds[2])
            for piece in range(0, value_size, WIDEST):
                width = min(WIDEST, value_size - piece)
                _sum_tile(room, sizes, many, piece, width)
                for row in range(many):
                    node, which = (tile + row) // group, head * group + (tile + row) % group
                    to = ((b * nodes + node) * heads + which) * value_size + piece
                    for c in range(width):
                        write(addresses[3], to + c, get(room.sums, row * WIDEST + c) / room.totals[row])


attend = compiled(_attend, releases_gil=True, makes_arrays=True)
