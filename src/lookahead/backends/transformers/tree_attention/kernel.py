"""Tree attention on a GPU: Triton kernels with packed masks.

One program computes a block of query rows for a share of the keys (a *split*) and one kv head. The rows of a block are
all query heads of this kv head for all nodes of the tree, so keys and values are read once. A program writes its share
of the softmax in float32, and a second kernel combines the shares in a fixed order: equal inputs give equal bits.

The number of splits and the sizes of blocks depend only on shapes. The kernel reads the length of a text from the
packed mask on the device, and divides the blocks of the text equally over the splits. So a nearly empty static cache
costs little, and a captured graph stays correct as the text grows.

Texts with pages in a shared buffer have separate programs, which process their blocks of rows in turn, usually one.
The length of a text decides how many splits it uses, so that a long text does not delay many short ones.

The other kernel computes bits that depend only on a query's own text: splits and blocks have fixed positions. A split
is `SPAN` positions of the text from a multiple of `SPAN` on, and its blocks begin at multiples of their size,
regardless of the length of the text, other queries and the capacity of buffers. Splits inside the cache are computed
for the rows of many nodes, as in the first kernel. For the last splits a program computes one node along its path, with
columns of keys from the mask (`along_paths`), so that a branch is summed like the text that it may become.
Both run the same instructions on blocks of the same shape with independent rows; a block without visible keys changes
no sum.
"""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from lookahead.backends.transformers.tree_attention import END, Pages
from lookahead.backends.transformers.tree_attention.running_softmax import (
    Tiling,
    attend,
    choose_tiling,
    fold,
    load_rows,
    store_share,
)
from lookahead.core.tree_masks import BITS, FIRST, SCRATCH, VISIBLE, WORD

# Triton accepts only its own constants as globals.
_VISIBLE = tl.constexpr(VISIBLE)
_FIRST = tl.constexpr(FIRST)
_SCRATCH = tl.constexpr(SCRATCH)
_BITS = tl.constexpr(BITS)
_WORD = tl.constexpr(WORD)
_END = tl.constexpr(END)
_LOG2_E = tl.constexpr(math.log2(math.e))

_LONG = tl.constexpr(1024)
"""Keys of a split of a long text among other texts."""

_MOST_SPLITS = 32
"""Largest number of splits of a text in pages; fewer for passes with many nodes, whose shares take memory."""

_SPLIT_NODES = 1 << 13
"""Largest number of nodes times splits."""

_ROWS_OF_A_TEXT = 16
"""Query rows of a block in passes with many texts, which usually have few nodes."""


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_mask: torch.Tensor,
    scaling: float | None = None,
    tiling: Tiling | None = None,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Compute attention of the nodes of a token tree to the cached text and to their ancestors, on a CUDA device.

    It reads nothing from the device, so a call may be captured in a CUDA graph, and replayed with other contents of the
    same tensors.

    Args:
        query: `[batch, heads, nodes, head_dim]`, float16, bfloat16 or float32.
        key: `[batch, kv_heads, keys, head_dim]`: cached tokens, then the nodes of this step, then unused columns.
            `heads` is a multiple of `kv_heads`.
        value: `[batch, kv_heads, keys, value_dim]`.
        packed_mask: `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32; see the package. It is not checked: the scratch
            must be within `keys`.
        scaling: Scaling of scores; 1 / sqrt(head_dim) if not given.
        tiling: Division of the work; by `choose_tiling` if not given.
        pages: Pages of the keys of each text, for several texts with a batch of 1.

    Returns:
        `[batch, nodes, heads, value_dim]` in the number type of `query`.
    """
    _, kv_heads, _, head_dim = key.shape
    nodes = query.shape[2]
    group = query.shape[1] // kv_heads
    texts, keys, where = _texts_of(key, packed_mask, pages)
    rows = nodes * group
    heads = texts * kv_heads
    if pages is not None:
        served = min(nodes, texts)
        usual = -(-rows // (served * _ROWS_OF_A_TEXT))  # blocks of a text, if all texts have equal numbers of nodes
        rows = min(rows, _ROWS_OF_A_TEXT)
        heads = served * usual * kv_heads
    if tiling is None:
        tiling = choose_tiling(rows, heads, keys, max(head_dim, value.shape[3]), key.dtype)
        if pages is not None:  # addresses of pages need registers, which sm_80 lacks
            tiling = replace(tiling, keys=min(tiling.keys, 32))
    few = tiling.splits
    if pages is not None:
        most = min(_MOST_SPLITS, _SPLIT_NODES // nodes)
        tiling = replace(tiling, splits=max(few, min(-(-keys // _LONG.value), most)))
    blocks = -(-nodes * group // tiling.rows)
    grid = blocks if pages is None else min(blocks, 2 * usual), tiling.splits, texts * kv_heads
    return attend(_attention_kernel, grid, (query, key, value, packed_mask), tiling, scaling, few=few, **where)


def _texts_of(key: torch.Tensor, mask: torch.Tensor, pages: Pages | None) -> tuple[int, int, dict[str, Any]]:
    """Return the number of texts, the largest number of keys of a text, and arguments of kernels for their pages."""
    if pages is None:  # kernels do not read the table
        return key.shape[0], key.shape[2], {"table": mask, "starts": mask, "table_stride": mask.stride(0), "PAGE": 0}
    texts, width = pages.table.shape
    where = {"table": pages.table, "starts": pages.starts, "table_stride": pages.table.stride(0), "PAGE": pages.size}
    return texts, width * pages.size, where


# These change from step to step; a value of 1 or a multiple of 16 must not compile the kernel again.
# Strides and sizes are separate arguments, because only newer versions of Triton accept tuples.
@triton.jit(do_not_specialize=["mask_stride", "nodes", "splits", "table_stride", "few"])
def _attention_kernel(
    query, key, value, mask, shares, sums,
    key_stride_b, key_stride_h, key_stride_n, value_stride_b, value_stride_h, value_stride_n, mask_stride,
    nodes, splits, scale, table, starts, table_stride, few,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute blocks of rows for one split and one kv head; grid `[row blocks at once, splits, batch * KV_HEADS]`.

    With `PAGE`, the number of tokens of a page, the batch has several texts with packed nodes from `starts` on.

    Row r of a head is node `r // GROUP` of query head `r % GROUP` in its group. A split writes its average of the
    values to `shares` `[batch * KV_HEADS, splits, rows, VALUE_SIZE]` and the base-2 logarithm of its sum of weights to
    `sums` `[batch * KV_HEADS, splits, rows]`. Without visible keys the latter is -inf, and no average is written.
    """
    split = tl.program_id(1)
    # Offsets of sequences, heads and blocks may exceed 32 bits; offsets inside a block do not.
    head = tl.program_id(2).to(tl.int64)
    batch = head // KV_HEADS
    kv_head = head % KV_HEADS
    rows = nodes * GROUP
    before = tl.zeros([], tl.int32)  # nodes of other texts in the same row
    if PAGE > 0:
        table += batch * table_stride
        before = tl.load(starts + batch)
        nodes = tl.load(starts + batch + 1) - before
        batch = batch * 0
        head = kv_head
    first_node = batch * (rows // GROUP) + before
    mask += first_node * mask_stride
    query += (first_node * KV_HEADS + kv_head) * GROUP * KEY_SIZE
    key += batch * key_stride_b + kv_head * key_stride_h
    value += batch * value_stride_b + kv_head * value_stride_h
    sums += (head * splits + split) * rows + before * GROUP
    shares += ((head * splits + split) * rows + before * GROUP) * VALUE_SIZE
    column = tl.arange(0, BLOCK_N)

    turns = 1
    if PAGE > 0:
        turns = tl.cdiv(tl.cdiv(nodes * GROUP, BLOCK_M) - tl.program_id(0), tl.num_programs(0))
    for turn in range(turns):
        row_block = tl.program_id(0) + turn * tl.num_programs(0)
        row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = row < nodes * GROUP
        node = row // GROUP
        member = row % GROUP
        own_mask = mask + node * mask_stride
        visible = tl.load(own_mask + _VISIBLE, mask=is_row, other=0)
        first = tl.load(own_mask + _FIRST, mask=is_row, other=0)
        scratch = tl.load(mask + _SCRATCH)

        # Blocks of keys for this row block: cached tokens visible to any of its rows, then slots up to its last node,
        # since parents precede their children. `few` splits, or more for a long text, get equal shares of them.
        length = tl.max(visible, 0)
        low = tl.minimum(tl.min(tl.where(visible > 0, first, 2147483647), 0), length)
        slots = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, nodes)
        cached_blocks = tl.cdiv(length - low, BLOCK_N)
        blocks = cached_blocks + tl.cdiv(slots, BLOCK_N)
        share = tl.cdiv(blocks, tl.minimum(tl.maximum(few, tl.cdiv(blocks * BLOCK_N, _LONG)), splits))
        begin = tl.minimum(split * share, blocks)
        end = tl.minimum(begin + share, blocks)

        is_seen = row < tl.where(begin < end, nodes * GROUP, 0)  # otherwise this split is empty
        query_block = load_rows(query, (node * KV_HEADS * GROUP + member) * KEY_SIZE, is_seen, KEY_SIZE, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        for block in range(begin, tl.minimum(end, cached_blocks)):
            position = low + block * BLOCK_N + column
            # Columns after the text are garbage, possibly NaN, which a weight of 0 does not remove.
            is_cached = position < length
            index = _index_of(position, is_cached, table, PAGE)
            key_block = load_rows(key, index * key_stride_n, is_cached, KEY_SIZE, BLOCK_K)
            value_block = load_rows(value, index * value_stride_n, is_cached, VALUE_SIZE, BLOCK_V)
            seen = (position[None, :] >= first[:, None]) & (position[None, :] < visible[:, None])
            scores = tl.dot(query_block, tl.trans(key_block), input_precision="ieee") * scale
            acc, peak, total = fold(tl.where(seen, scores, float("-inf")), value_block, acc, peak, total)

        for block in range(tl.maximum(begin - cached_blocks, 0), end - cached_blocks):
            slot = block * BLOCK_N + column
            is_slot = slot < slots
            index = _index_of(scratch + slot, is_slot, table, PAGE)
            key_block = load_rows(key, index * key_stride_n, is_slot, KEY_SIZE, BLOCK_K)
            value_block = load_rows(value, index * value_stride_n, is_slot, VALUE_SIZE, BLOCK_V)
            # 32 adjacent slots share a word.
            words = tl.load(
                own_mask[:, None] + (slot // _WORD + _BITS)[None, :], mask=is_row[:, None] & is_slot[None, :], other=0
            )
            seen = ((words >> (slot % _WORD)[None, :]) & 1) != 0
            scores = tl.dot(query_block, tl.trans(key_block), input_precision="ieee") * scale
            acc, peak, total = fold(tl.where(seen, scores, float("-inf")), value_block, acc, peak, total)

        store_share(shares, sums, acc, peak, total, row, is_row, is_seen, VALUE_SIZE, BLOCK_V)


@triton.jit
def _index_of(column, is_there, table, PAGE: tl.constexpr):
    """Return the indices of a text's columns in its own buffer, or in the shared one."""
    if PAGE > 0:
        page = tl.load(table + column // PAGE, mask=is_there, other=0).to(tl.int64)
        return page * PAGE + column % PAGE
    return column.to(tl.int64)


SPAN = 256
"""Positions of a split. Each node reads less than this, and its path, separately from other nodes."""
_ROWS_BY_POSITION = 64
"""Largest number of query rows of a block, for any number of nodes."""


def attention_by_position(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    path_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Compute `tree_attention` with bits that depend only on a query's own text.

    `path_mask` is `[batch, 1, nodes, 3 + slots]` int32 (`along_paths`), and is not checked. `softcap`
    limits scores: `softcap * tanh(score / softcap)`.
    """
    _, kv_heads, _, head_dim = key.shape
    group = query.shape[1] // kv_heads
    texts, keys, where = _texts_of(key, path_mask, pages)
    # The same blocks for all steps of a model.
    tiling = choose_tiling(_ROWS_BY_POSITION, 1, SPAN, max(head_dim, value.shape[3]), key.dtype)
    tiling = replace(tiling, splits=-(-keys // SPAN))
    grid = query.shape[2] * -(-group // tiling.rows), tiling.splits, texts * kv_heads
    extra = {"cap": softcap or 0.0, "CAPPED": softcap is not None, "slots": path_mask.shape[3] - BITS, "SPAN": SPAN}
    return attend(_by_position_kernel, grid, (query, key, value, path_mask), tiling, scaling, **extra, **where)


@triton.jit(do_not_specialize=["mask_stride", "nodes", "slots", "splits", "table_stride"])
def _by_position_kernel(
    query, key, value, mask, shares, sums,
    key_stride_b, key_stride_h, key_stride_n, value_stride_b, value_stride_h, value_stride_n, mask_stride,
    nodes, splits, scale, cap, slots, table, starts, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    SPAN: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute rows for one split and one kv head; grid `[nodes * ceil(GROUP / BLOCK_M), splits, batch * KV_HEADS]`.

    `PAGE`, `shares` and `sums` are as for `_attention_kernel`.
    """
    part = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    batch = head // KV_HEADS
    kv_head = head % KV_HEADS
    first_node = batch * nodes
    all_rows = nodes * GROUP
    # The rows are blocks over all nodes, or the rows of one node, which never need fewer programs.
    parts = (GROUP + BLOCK_M - 1) // BLOCK_M
    if PAGE > 0:
        table += batch * table_stride
        first_node = tl.load(starts + batch).to(tl.int64)
        nodes = tl.load(starts + batch + 1) - first_node
        batch = batch * 0
        head = kv_head
        if part >= nodes * parts:
            return
    mask += first_node * mask_stride
    length = tl.load(mask + _VISIBLE)  # of the text; the first node is padding only if all are
    begin = split * SPAN
    in_cache = begin + SPAN <= length
    one = part // parts
    rows = nodes * GROUP
    row = tl.where(in_cache, part * BLOCK_M, one * GROUP + part % parts * BLOCK_M) + tl.arange(0, BLOCK_M)
    is_row = row < tl.where(in_cache, rows, (one + 1) * GROUP)
    node = row // GROUP
    member = row % GROUP
    own_mask = mask + node * mask_stride
    visible = tl.load(own_mask + _VISIBLE, mask=is_row, other=0)
    first = tl.load(own_mask + _FIRST, mask=is_row, other=0)
    path = mask + one * mask_stride
    branch = tl.maximum(tl.load(path + _FIRST), length)  # first position of its columns
    low = tl.min(tl.where(visible > first, first, 2147483647), 0)
    low = tl.where(in_cache, low, tl.minimum(low, branch))
    end = tl.minimum(begin + SPAN, tl.where(in_cache, length, tl.load(path + _END)))
    begin += tl.maximum(low - begin, 0) // BLOCK_N * BLOCK_N
    before = (head * splits + split) * all_rows
    if PAGE > 0:
        before += first_node * GROUP
    sums += before
    if begin >= end:
        tl.store(sums + row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
        return

    column = tl.arange(0, BLOCK_N)
    query += (first_node * KV_HEADS + kv_head) * GROUP * KEY_SIZE
    query_block = load_rows(query, (node * KV_HEADS * GROUP + member) * KEY_SIZE, is_row, KEY_SIZE, BLOCK_K)
    key += batch * key_stride_b + kv_head * key_stride_h
    value += batch * value_stride_b + kv_head * value_stride_h
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    for start in range(begin, end, BLOCK_N):
        position = start + column
        depth = position - branch  # negative in a split inside the cache
        index = tl.load(path + _BITS + depth, mask=(depth >= 0) & (depth < slots), other=-1)
        on_path = index >= 0
        # Columns after the text are garbage, possibly NaN, which a weight of 0 does not remove: they are not read.
        is_there = on_path | (position < length)
        index = _index_of(tl.where(on_path, index, position), is_there, table, PAGE)
        key_block = load_rows(key, index * key_stride_n, is_there, KEY_SIZE, BLOCK_K)
        value_block = load_rows(value, index * value_stride_n, is_there, VALUE_SIZE, BLOCK_V)
        seen = (position[None, :] >= first[:, None]) & (position[None, :] < visible[:, None])
        scores = tl.dot(query_block, tl.trans(key_block), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both ends.
            scores = cap * _LOG2_E * (1.0 - 2.0 / (tl.exp2(2.0 / cap * scores) + 1.0))
        acc, peak, total = fold(tl.where(seen | on_path[None, :], scores, float("-inf")), value_block, acc, peak, total)

    shares += before * VALUE_SIZE
    store_share(shares, sums, acc, peak, total, row, is_row, is_row, VALUE_SIZE, BLOCK_V)
