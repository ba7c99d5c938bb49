"""Common parts of the tree attention kernels: their launch, and a softmax over blocks and splits of keys."""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

_PROGRAMS = 128
"""Programs that fill a large GPU: about one for each multiprocessor."""
_MAX_SPLITS = 32


@dataclass(frozen=True)
class Tiling:
    """Division of the work into programs.

    Attributes:
        rows: Query rows in a block, a power of two.
        keys: Keys in a block, a power of two.
        splits: Number of shares of the keys, a power of two.
        warps: Warps of a program.
        stages: Depth of the pipeline that loads keys and values.
    """

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def choose_tiling(rows: int, heads: int, keys: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Divide the work into programs by shapes, so that a captured graph fits every later step.

    Args:
        rows: Query rows of a kv head: nodes times the size of the group.
        heads: Number of kv heads, times the batch.
        keys: Number of columns in the buffer.
        head_dim: The larger size of keys and values.
        dtype: Number type of keys and values.
    """
    # The largest blocks with accumulators in registers on sm_80 and sm_90, and with keys and values in 99 KiB of shared
    # memory, the limit of consumer cards (sm_8x).
    full = dtype == torch.float32
    if full:
        # float32 does not use tensor cores: products need registers.
        max_rows = 32 if head_dim <= 64 else 16
        block_keys = 16
    else:
        max_rows = 64
        block_keys = 64 if head_dim <= 128 else 32
    block_rows = min(max(triton.next_power_of_2(rows), 16), max_rows)
    if block_rows == 64 and head_dim > 64:
        block_keys = 32
    wide = head_dim > 128 and (full or block_rows > 16)
    stages = 2 if full or (wide and block_rows > 32) else 3
    programs = heads * -(-rows // block_rows)
    fill = max(_PROGRAMS // programs, min(2 * _PROGRAMS // programs, 8))  # twice where these are few splits
    count = min(fill, keys // block_keys, _MAX_SPLITS)
    splits = 1 << (count.bit_length() - 1) if count > 1 else 1
    return Tiling(block_rows, block_keys, splits, warps=8 if wide else 4, stages=stages)


def attend(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tiling: Tiling,
    scaling: float | None,
    **extra: Any,
) -> torch.Tensor:
    """Launch a kernel with one program for each block of rows, split of keys and kv head, and combine the splits.

    Args:
        kernel: Kernel that writes the average of values and the logarithm of the sum of weights of each split, in
            float32.
        grid: Number of blocks of rows, of splits, and of kv heads of all texts.
        tensors: Query, key and value as for `kernel.tree_attention`, and the mask.
        tiling: Division of the work.
        scaling: Scaling of scores; 1 / sqrt(head_dim) if not given.
        **extra: Further arguments of this kernel.

    Returns:
        `[batch, nodes, heads, value_dim]` in the number type of the query.
    """
    query, key, value, mask = tensors
    query, mask = query.transpose(1, 2).contiguous(), mask.contiguous()  # usually no copy
    # Only buffers with gaps in the innermost dimension are copied.
    key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (key, value))
    batch, nodes, heads, key_size = query.shape
    kv_heads = value.shape[1]
    value_size = value.shape[3]
    splits = tiling.splits
    rows = nodes * heads // kv_heads
    shares = query.new_empty((batch * kv_heads, splits, rows, value_size), dtype=torch.float32)
    sums = query.new_empty(shares.shape[:3], dtype=torch.float32)
    output = query.new_empty((batch, nodes, heads, value_size))
    sizes = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "VALUE_SIZE": value_size,
        "BLOCK_V": max(triton.next_power_of_2(value_size), 16),
    }
    # A softmax to the base 2, as the hardware computes it: exp(x) = exp2(x * log2(e)).
    scale = (key_size**-0.5 if scaling is None else scaling) * math.log2(math.e)
    with torch.cuda.device_of(query):
        kernel[grid](
            *(query, key, value, mask, shares, sums),
            *(*key.stride()[:3], *value.stride()[:3], mask.stride(2), nodes, splits, scale),
            KEY_SIZE=key_size,
            BLOCK_M=tiling.rows,
            BLOCK_N=tiling.keys,
            BLOCK_K=max(triton.next_power_of_2(key_size), 16),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            enable_fp_fusion=True,
            **extra,
            **sizes,
        )
        combine_kernel[rows, batch * kv_heads](
            *(shares, sums, output, nodes, splits), num_warps=4, enable_fp_fusion=True, **sizes
        )
    return output


@triton.jit
def load_rows(start, offset, is_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of queries, keys or values; other rows are zero, without a read."""
    dim = tl.arange(0, BLOCK)
    return tl.load(start + offset[:, None] + dim[None, :], mask=is_row[:, None] & (dim < SIZE)[None, :], other=0.0)


@triton.jit
def fold(scores, value, acc, peak, total):
    """Add the scores of one block of keys, to the base 2, to a running softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row without visible keys so far has the peak -inf, and -inf minus -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def store_share(shares, sums, acc, peak, total, row, is_row, is_seen, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the averages and sums of some rows in one split for `combine_kernel`."""
    # A row without visible keys in this split has the sum -inf, and does not count.
    total = tl.where(total == 0.0, 1.0, total)
    dim = tl.arange(0, BLOCK)
    stored = is_seen[:, None] & (dim < SIZE)[None, :]
    tl.store(shares + (row * SIZE)[:, None] + dim[None, :], acc / total[:, None], mask=stored)
    tl.store(sums + row, peak + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["nodes", "splits"])
def combine_kernel(
    shares, sums, out, nodes, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row; grid `[rows, batch * KV_HEADS]`. See `kernel._attention_kernel`.

    It processes sixteen splits at a time; missing splits and splits without visible keys change no bit.
    """
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = head // KV_HEADS
    kv_head = head % KV_HEADS
    rows = nodes * GROUP
    dim = tl.arange(0, BLOCK_V)
    sums += head * splits * rows + row
    shares += (head * splits * rows + row) * VALUE_SIZE
    peak = float("-inf")
    for start in range(0, splits, 16):
        split = start + tl.arange(0, 16)
        peak = tl.maximum(peak, tl.max(tl.load(sums + split * rows, mask=split < splits, other=float("-inf")), 0))
    total = 0.0
    result = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, splits, 16):
        split = start + tl.arange(0, 16)
        own_sums = tl.load(sums + split * rows, mask=split < splits, other=float("-inf"))
        # A split without visible keys wrote nothing: its memory is not read.
        mine = tl.load(
            shares + (split.to(tl.int64) * rows * VALUE_SIZE)[:, None] + dim[None, :],
            mask=(own_sums > float("-inf"))[:, None] & (dim < VALUE_SIZE)[None, :],
            other=0.0,
        )
        weights = tl.exp2(own_sums - peak)  # finite, because every row sees itself
        total += tl.sum(weights, 0)
        result += tl.sum(weights[:, None] * mine, 0)
    out += ((batch * nodes + row // GROUP) * KV_HEADS + kv_head) * GROUP * VALUE_SIZE + row % GROUP * VALUE_SIZE
    tl.store(out + dim, (result / total).to(out.dtype.element_ty), mask=dim < VALUE_SIZE)
