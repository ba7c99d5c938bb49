"""Fused kernels for norms with residual sums, rotary embeddings with writes to the cache, and gates, on a GPU.

They round at the same points as the separate operations of models.
"""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.language import constexpr  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-untyped, import-not-found, unused-ignore]


@dataclass(frozen=True, slots=True)
class LateKey:
    """Keys, in place of a tensor, that are rotated when they are written to the cache; see `rotate_into`.

    Attributes:
        query, key, cos, sin: As for `rotate`.
        rotated: Rotated queries, empty until then.
    """

    query: Any
    key: Any
    cos: Any
    sin: Any
    rotated: Any


def gate(states: Any, others: Any) -> torch.Tensor:
    """Return SiLU of `states` times `others`, in a 16-bit type."""
    states, others = states.contiguous(), others.contiguous()
    output = torch.empty_like(states)
    count = states.numel()
    with torch.cuda.device_of(states):
        _gate_kernel[triton.cdiv(count, 1024),](states, others, output, count, 1024, enable_fp_fusion=False)
    return output


@triton.jit
def _gate_kernel(states, others, output, count, BLOCK: constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    state = tl.load(states + place, mask=there, other=0.0)
    wide = state.to(tl.float32)
    # As torch computes it, with the exponential function of CUDA and an exact division.
    active = tl.div_rn(wide, 1.0 + libdevice.exp(-wide)).to(state.dtype).to(tl.float32)
    other = tl.load(others + place, mask=there, other=0.0).to(tl.float32)
    tl.store(output + place, (active * other).to(state.dtype), mask=there)


def rms_norm(hidden: Any, weight: Any, epsilon: float, rounds_first: bool, offset: float) -> torch.Tensor:
    """Return the RMS norm of `hidden` `[..., size]` with `weight` `[size]` plus `offset`; see `fused.MANNERS`."""
    return _normed(hidden, None, weight, epsilon, rounds_first, offset)[1]


def add_norm(
    hidden: Any, update: Any, weight: Any, epsilon: float, rounds_first: bool, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of `hidden` and `update`, and its `rms_norm`."""
    return _normed(hidden, update, weight, epsilon, rounds_first, offset)


def _normed(hidden: Any, update: Any, weight: Any, epsilon: float, *manner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    dtype = torch.promote_types(hidden.dtype, weight.dtype) if manner[0] else hidden.dtype
    output = torch.empty_like(rows, dtype=dtype)
    adds = update is not None
    updates = update.reshape(rows.shape).contiguous() if adds else rows
    total = torch.empty_like(rows) if adds else rows
    size = rows.shape[1]
    block = triton.next_power_of_2(size)
    options = {"num_warps": min(max(block // 512, 1), 8), "enable_fp_fusion": False}
    with torch.cuda.device_of(rows):
        _norm_kernel[len(rows),](rows, updates, weight, total, output, epsilon, size, block, *manner, adds, **options)
    return total.view(hidden.shape), output.view(hidden.shape)


@triton.jit
def _norm_kernel(
    hidden, updates, weight, total, output, epsilon,
    SIZE: constexpr, BLOCK: constexpr, ROUNDS_FIRST: constexpr, OFFSET: constexpr, ADDS: constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * SIZE
    states = tl.load(hidden + start + place, mask=place < SIZE, other=0.0)
    if ADDS:
        update = tl.load(updates + start + place, mask=place < SIZE, other=0.0)
        states = (states.to(tl.float32) + update.to(tl.float32)).to(states.dtype)
        tl.store(total + start + place, states, mask=place < SIZE)
    wide = states.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    if ROUNDS_FIRST:
        wide = wide.to(states.dtype).to(tl.float32)
    factor = tl.load(weight + place, mask=place < SIZE, other=0.0).to(tl.float32) + OFFSET
    tl.store(output + start + place, (wide * factor).to(output.dtype.element_ty), mask=place < SIZE)


def rotate(query: Any, key: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys `[batch, heads, nodes, size]` by `cos` and `sin` `[batch, nodes, part]`.

    The first half of a part is rotated with the second one; elements after the part stay.
    """
    states = [tensor.transpose(1, 2).contiguous() for tensor in (query, key)]  # the layout of the projections
    angles = [tensor.expand(len(query), -1, -1).contiguous() for tensor in (cos, sin)]
    outputs = [torch.empty_like(tensor) for tensor in states]
    batch, nodes, heads, size = states[0].shape
    constants = heads, size, cos.shape[2], triton.next_power_of_2(size)
    grid = batch * nodes, heads + key.shape[1]
    with torch.cuda.device_of(query):
        _rotate_kernel[grid](*states, *angles, *outputs, *constants, num_warps=1, enable_fp_fusion=False)
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, to_query, to_key, HEADS: constexpr, SIZE: constexpr, PART: constexpr, BLOCK: constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < HEADS:
        source = query
        target = to_query
        start = (row * HEADS + head) * SIZE
    else:
        source = key
        target = to_key
        start = (row * (tl.num_programs(1) - HEADS) + head - HEADS) * SIZE
    place = tl.arange(0, BLOCK)
    turned = _turned(source + start, cos + row * PART, sin + row * PART, SIZE, PART, BLOCK)
    tl.store(target + start + place, turned, mask=place < SIZE)


@triton.jit
def _turned(source, cos, sin, SIZE: constexpr, PART: constexpr, BLOCK: constexpr):
    """Return the rotated states of a head."""
    place = tl.arange(0, BLOCK)
    turns = place < PART
    is_first = place < PART // 2
    partner = tl.where(is_first, place + PART // 2, place - PART // 2)
    states = tl.load(source + place, mask=place < SIZE, other=0.0)
    others = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cos + place, mask=turns, other=0.0).to(tl.float32)
    sine = tl.load(sin + place, mask=turns, other=0.0).to(tl.float32)
    # Each product is rounded, as in the separate operations.
    cosines = (states.to(tl.float32) * cosine).to(states.dtype).to(tl.float32)
    across = (tl.where(is_first, -others, others) * sine).to(states.dtype).to(tl.float32)
    return tl.where(turns, (cosines + across).to(states.dtype), states)


def rotate_into(late: LateKey, value: Any, keys: Any, values: Any, columns: Any) -> None:
    """Rotate as `rotate` does, and write keys and values to columns of a cache.

    Args:
        late: Queries and keys; `rotated` is written.
        value: `[batch, kv_heads, nodes, value_size]`.
        keys: Buffer `[batch, kv_heads, capacity, size]` with contiguous states.
        values: Buffer `[batch, kv_heads, capacity, value_size]`.
        columns: Columns of the nodes, `[nodes]` int64.
    """
    states = [tensor.transpose(1, 2).contiguous() for tensor in (late.query, late.key, value)]
    angles = [tensor.expand(len(value), -1, -1).contiguous() for tensor in (late.cos, late.sin)]
    batch, nodes, heads, size = states[0].shape
    shared, value_size = states[2].shape[2:]
    strides = *keys.stride()[:3], *values.stride()[:3]
    constants = heads, shared, size, value_size, angles[0].shape[2], triton.next_power_of_2(max(size, value_size))
    grid = batch * nodes, heads + 2 * shared
    arguments = *states, *angles, late.rotated, keys, values, columns, *strides, nodes, *constants
    with torch.cuda.device_of(value):
        _rotate_into_kernel[grid](*arguments, num_warps=1, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["nodes"])
def _rotate_into_kernel(
    query, key, value, cos, sin, to_query, keys, values, columns,
    key_stride_b, key_stride_h, key_stride_n, value_stride_b, value_stride_h, value_stride_n, nodes,
    HEADS: constexpr, KV_HEADS: constexpr, SIZE: constexpr, VALUE_SIZE: constexpr, PART: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    cos += row * PART
    sin += row * PART
    if head < HEADS:
        start = (row * HEADS + head) * SIZE
        turned = _turned(query + start, cos, sin, SIZE, PART, BLOCK)
        tl.store(to_query + start + place, turned, mask=place < SIZE)
    else:
        text = row // nodes
        column = tl.load(columns + row % nodes)
        if head < HEADS + KV_HEADS:
            head -= HEADS
            turned = _turned(key + (row * KV_HEADS + head) * SIZE, cos, sin, SIZE, PART, BLOCK)
            keys += text * key_stride_b + head * key_stride_h + column * key_stride_n
            tl.store(keys + place, turned, mask=place < SIZE)
        else:
            head -= HEADS + KV_HEADS
            states = tl.load(value + (row * KV_HEADS + head) * VALUE_SIZE + place, mask=place < VALUE_SIZE)
            values += text * value_stride_b + head * value_stride_h + column * value_stride_n
            tl.store(values + place, states, mask=place < VALUE_SIZE)
