"""Tree attention whose bits for a query depend on its own text alone: splits and blocks lie at fixed positions.

A split is `SPAN` positions of the text, from a multiple of `SPAN` on, and its blocks begin at multiples of their size,
whatever the length of the text, the other queries and the room in the buffers. Splits that lie in the cache as a whole
are read by programs that serve the rows of many nodes, as in `kernel`. The last ones are of the path that each node
has: a program serves one node, and takes the columns of its keys from the mask (`packed_mask.along_paths`), so that a
branch is summed as the text that it may become. Both run the same instructions on blocks of the same shape, in which no
row has to do with the others; a block of which a row sees nothing leaves its sums as they are.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from lookahead.backends.transformers.tree_attention.packed_mask import BITS, END, FIRST, VISIBLE
from lookahead.backends.transformers.tree_attention.running_softmax import (
    Attention,
    choose_tiling,
    fold,
    load_rows,
    scores_of,
)

_VISIBLE, _FIRST, _END, _PATH = tl.constexpr(VISIBLE), tl.constexpr(FIRST), tl.constexpr(END), tl.constexpr(BITS)

SPAN = 256
"""Positions of a split. A node reads less than this, and its own path, without sharing it with others."""
_ROWS = 64
"""Query rows of a block at most, as many whatever there are."""


def attention_by_position(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    path_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `kernel.tree_attention`, with the same bits for a query in any company, at any place in the cache.

    Args:
        query: `[batch, heads, nodes, head_dim]`, float16, bfloat16 or float32.
        key: `[batch, kv_heads, keys, head_dim]`: a buffer with the cached tokens and the nodes of this step.
        value: `[batch, kv_heads, keys, value_dim]`.
        path_mask: `[batch, 1, nodes, 3 + slots]` int32; see `packed_mask.along_paths`. What it says is not checked.
        scaling: What scores are multiplied by.
        softcap: Scores are bent to stay below this: `softcap * tanh(score / softcap)`.

    Returns:
        `[batch, nodes, heads, value_dim]` in the number type of `query`.

    Raises:
        InvalidArgumentError: The tensors are not on a CUDA device, and Triton's interpreter is not on.
    """
    attention = Attention(_attention_kernel, query, key, value, path_mask)
    splits = -(-key.shape[2] // SPAN)
    # The same blocks for all steps of a model.
    tiling = replace(choose_tiling(_ROWS, 1, SPAN, attention.head_dim, key.dtype), splits=splits)
    programs = query.shape[2] * -(-attention.group // tiling.rows)
    return attention.run(programs, tiling, scaling, softcap, slots=path_mask.shape[3] - BITS, SPAN=SPAN)


@triton.jit(do_not_specialize=["mask_stride_b", "mask_stride_t", "nodes", "slots", "splits"])
def _attention_kernel(
    query,
    key,
    value,
    mask,
    out,
    sums,
    query_stride_b,
    query_stride_h,
    query_stride_t,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    mask_stride_b,
    mask_stride_t,
    nodes,
    splits,
    scale,
    cap,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPAN: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Some rows, one split, one head of keys; grid `[nodes * ceil(GROUP / BLOCK_M), splits, batch * KV_HEADS]`.

    `out` and `sums` are as those of `kernel._attention_kernel`.
    """
    part, split = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    batch, kv_head = head // KV_HEADS, head % KV_HEADS
    mask += batch * mask_stride_b
    length = tl.load(mask + _VISIBLE)  # of the text; the first node is padding only where all are
    begin = split * SPAN
    in_cache = begin + SPAN <= length
    # The rows: of all nodes, block after block, or of one node. The latter are no fewer programs than the former.
    parts = (GROUP + BLOCK_M - 1) // BLOCK_M
    one = part // parts
    rows = nodes * GROUP
    row = tl.where(in_cache, part * BLOCK_M, one * GROUP + part % parts * BLOCK_M) + tl.arange(0, BLOCK_M)
    is_row = row < tl.where(in_cache, rows, (one + 1) * GROUP)
    node, member = row // GROUP, row % GROUP
    own_mask = mask + node * mask_stride_t
    visible = tl.load(own_mask + _VISIBLE, mask=is_row, other=0)
    first = tl.load(own_mask + _FIRST, mask=is_row, other=0)
    path = mask + one * mask_stride_t
    branch = tl.maximum(tl.load(path + _FIRST), length)  # the position where its columns begin
    low = tl.min(tl.where(visible > first, first, 2147483647), 0)
    low = tl.where(in_cache, low, tl.minimum(low, branch))
    end = tl.minimum(begin + SPAN, tl.where(in_cache, length, tl.load(path + _END)))
    begin += tl.maximum(low - begin, 0) // BLOCK_N * BLOCK_N
    sums += (head * splits + split) * rows
    if begin >= end:
        tl.store(sums + row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
        return

    column = tl.arange(0, BLOCK_N)
    key_dim, value_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key_dim, is_value_dim = key_dim < KEY_SIZE, value_dim < VALUE_SIZE
    query += batch * query_stride_b + kv_head * GROUP * query_stride_h
    query_offsets = (node * query_stride_t + member * query_stride_h)[:, None] + key_dim[None, :]
    query_block = load_rows(query, query_offsets, is_row, is_key_dim)
    key += batch * key_stride_b + kv_head * key_stride_h
    value += batch * value_stride_b + kv_head * value_stride_h
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    for start in range(begin, end, BLOCK_N):
        position = start + column
        index = position - branch  # below 0 all over a split in the cache
        place = tl.load(path + _PATH + index, mask=(index >= 0) & (index < slots), other=-1)
        on_path = place >= 0
        # Behind the text lies garbage. A weight of 0 does not make a value harmless that is no number: it is not read.
        is_there = on_path | (position < length)
        place = tl.where(on_path, place, position).to(tl.int64)
        key_block = load_rows(key, (place * key_stride_n)[:, None] + key_dim[None, :], is_there, is_key_dim)
        value_block = load_rows(value, (place * value_stride_n)[:, None] + value_dim[None, :], is_there, is_value_dim)
        seen = (position[None, :] >= first[:, None]) & (position[None, :] < visible[:, None])
        scores = scores_of(query_block, key_block, scale, cap, CAPPED)
        acc, peak, total = fold(tl.where(seen | on_path[None, :], scores, float("-inf")), value_block, acc, peak, total)

    total = tl.where(total == 0.0, 1.0, total)
    acc /= total[:, None]
    out += (head * splits + split) * rows * VALUE_SIZE
    stored = is_row[:, None] & is_value_dim[None, :]
    tl.store(out + (row * VALUE_SIZE)[:, None] + value_dim[None, :], acc, mask=stored)
    tl.store(sums + row, peak + tl.log2(total), mask=is_row)
