"""Likeliest tokens after nodes on a GPU, by one read of the logits.

torch reads them in a dozen kernels: `argmax`, `topk`, a copy in float32, `softmax`, `gather`. Here each program lists
the largest logits of a part of a row and the sum of the softmax, and a second kernel merges the parts. A value and its
index are one integer, ordered by value and then by lower index. So equal values are listed in order, as by `argmax`.
"""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from lookahead.errors import not_of_signal

PART = 4096
"""Logits of a program."""

MAX_LISTED = 16
"""Largest number of listed tokens; each one costs a reduction."""

_LOWEST = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


def list_largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return a summary of logits `[rows, vocabulary]` as `pack_likeliest` does, int32 `[rows, 1 + 2 * count]`.

    The likeliest token, the `count` likeliest ones, and the bits of their probabilities in float32.

    Args:
        logits: float16, bfloat16 or float32, contiguous in the vocabulary.
        count: From 1 to `MAX_LISTED`, at most the vocabulary.
    """
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // PART)
    largest = torch.empty(rows, parts, count, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    packed = torch.empty(rows, 1 + 2 * count, dtype=torch.int32, device=logits.device)
    if not rows:
        return packed
    width = triton.next_power_of_2(parts * count)
    with torch.cuda.device_of(logits):
        _part_kernel[rows, parts](logits, largest, sums, logits.stride(0), vocabulary, count, PART, num_warps=8)
        _merge_kernel[rows,](largest, sums, packed, parts, count, width, num_warps=4)
    return packed


@triton.jit
def _order(bits):
    """Turn the bits of a float into an integer with the same order, and back."""
    return tl.where(bits < 0, bits ^ _LAST, bits)


@triton.jit
def _value(key):
    """Return the float of a key."""
    return _order((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["row_stride", "vocabulary"])
def _part_kernel(logits, largest, sums, row_stride, vocabulary, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """List the largest logits of a part, and sum their exponentials relative to the first; grid `[rows, parts]`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * SIZE + tl.arange(0, SIZE)
    is_token = token < vocabulary
    values = tl.load(logits + row * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("nan"), values + 0.0)  # NaN without a sign comes first, -0 equals 0
    ordered = _order(values.to(tl.int32, bitcast=True)).to(tl.int64)
    keys = tl.where(is_token, (ordered << 32) | (token ^ _LAST).to(tl.int64), _LOWEST)
    place = row * tl.num_programs(1) + part
    first = tl.max(keys, 0)
    peak = _value(first)
    shifted = tl.where(peak == float("-inf"), 0.0, tl.exp(values - peak))
    tl.store(sums + place, tl.sum(tl.where(is_token, shifted, 0.0), 0))
    for number in tl.static_range(COUNT):
        tl.store(largest + place * COUNT + number, first)
        keys = tl.where(keys == first, _LOWEST, keys)
        first = tl.max(keys, 0)


@triton.jit(do_not_specialize=["parts"])
def _merge_kernel(largest, sums, packed, parts, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the lists of all parts of a row; grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    is_listed = place < parts * COUNT
    keys = tl.load(largest + row * parts * COUNT + place, mask=is_listed, other=_LOWEST)
    first = tl.max(keys, 0)
    peak = _value(first)
    # The first of each part's list is the part's maximum.
    is_peak = is_listed & (place % COUNT == 0)
    of_part = tl.load(sums + row * parts + place // COUNT, mask=is_peak, other=0.0)
    peaks = tl.where(is_peak, _value(keys), float("-inf"))
    weights = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak))
    total = tl.sum(tl.where(is_peak, of_part * weights, 0.0), 0)
    packed += row * (1 + 2 * COUNT)
    tl.store(packed, (first & 0xFFFFFFFF).to(tl.int32) ^ _LAST)
    for number in tl.static_range(COUNT):
        tl.store(packed + 1 + number, (first & 0xFFFFFFFF).to(tl.int32) ^ _LAST)
        probability = tl.exp(_value(first) - peak) / total
        tl.store(packed + 1 + COUNT + number, probability.to(tl.int32, bitcast=True))
        keys = tl.where(keys == first, _LOWEST, keys)
        first = tl.max(keys, 0)


@cache
@torch.no_grad()
def lists_alike(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `list_largest` lists torch's tokens here; tried once.

    The trial has random, equal, infinite and invalid logits, and zeros of both signs.
    """
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 2 * PART + 5, generator=random, device="cpu")
    logits[1] = logits[1].round()  # equal values
    logits[2, 7:] = -torch.inf
    logits[3, 9] = torch.nan
    logits[4] = -0.0
    logits[4, 1::2] = 0.0
    logits = logits.to(device, dtype)
    try:
        packed = list_largest(logits, 8)
    except Exception as error:  # the kernel does not compile here
        not_of_signal(error)
        return False
    probabilities = packed[:, 9:].view(torch.float32)
    expected = torch.softmax(logits.float(), dim=-1).gather(1, packed[:, 1:9].long())
    same = torch.equal(packed[:, 0].long(), logits.argmax(dim=-1))
    same &= torch.equal(logits[:2].gather(1, packed[:2, 1:9].long()), logits[:2].topk(8, dim=-1).values)
    return same and torch.allclose(probabilities, expected, rtol=1e-4, atol=1e-7, equal_nan=True)
