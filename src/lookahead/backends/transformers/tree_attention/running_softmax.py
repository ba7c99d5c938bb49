"""What the kernels of tree attention share: a softmax over blocks of keys, and over splits of them."""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from lookahead.errors import InvalidArgumentError


def refuse_other_devices(query: torch.Tensor, kernel: object) -> None:
    """Raise an `InvalidArgumentError` if `kernel` cannot read `query` where it is: compiled ones run on CUDA alone."""
    if not query.is_cuda and isinstance(kernel, triton.JITFunction):
        raise InvalidArgumentError(
            f"tree attention got tensors on {query.device}, but its kernel runs on CUDA devices only; choose "
            "attn_implementation='sdpa' there"
        )


def unit_strides(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, copied where their innermost dimension has gaps; any other one is read as it lies."""
    return tuple(states if states.stride(-1) == 1 else states.contiguous() for states in tensors)


def sizes_of_heads(query: torch.Tensor, value: torch.Tensor) -> dict[str, int]:
    """What kernels know of heads when they are compiled."""
    kv_heads, value_size = value.shape[1], value.shape[3]
    block_v = max(triton.next_power_of_2(value_size), 16)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": query.shape[1] // kv_heads,
        "VALUE_SIZE": value_size,
        "BLOCK_V": block_v,
    }


def shares_of_splits(query: torch.Tensor, splits: int, sizes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the average of the values of each split, `[batch * KV_HEADS, splits, rows, VALUE_SIZE]` float32, and
    for the logarithm of its sum of weights, `[batch * KV_HEADS, splits, rows]` float32."""
    shape = (query.shape[0] * sizes["KV_HEADS"], splits, query.shape[2] * sizes["GROUP"])
    averages = query.new_empty((*shape, sizes["VALUE_SIZE"]), dtype=torch.float32)
    return averages, query.new_empty(shape, dtype=torch.float32)


def score_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Scale and cap of a softmax to the base 2, which is what the hardware computes: exp(x) = exp2(x * log2(e))."""
    if softcap is None:
        return scaling * math.log2(math.e), 0.0
    return 2.0 * math.log2(math.e) * scaling / softcap, softcap * math.log2(math.e)


@triton.jit
def load_rows(start, offsets, is_row, is_dim):
    """The rows and dimensions that are there, of queries, keys or values; zeros for the others, which are not read."""
    return tl.load(start + offsets, mask=is_row[:, None] & is_dim[None, :], other=0.0)


@triton.jit
def scores_of(query, key, scale, cap, CAPPED: tl.constexpr):
    """Scores to the base 2, `[BLOCK_M, BLOCK_N]` float32."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both ends; the factor 2 is in the scale.
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def fold(scores, value, acc, peak, total):
    """Take one block of keys into a running softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has no peak, and -inf less -inf is no number.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["nodes", "splits"])
def combine_kernel(
    shares,
    sums,
    out,
    nodes,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Put the splits of one row together; grid `[rows, batch * KV_HEADS]`. See `kernel._attention_kernel`.

    Sixteen splits at a time, whatever their number: those that are not there, or saw nothing, change no bit.
    """
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch, kv_head = head // KV_HEADS, head % KV_HEADS
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
        # A split that saw nothing wrote nothing: what lies there is not read.
        mine = tl.load(
            shares + (split.to(tl.int64) * rows * VALUE_SIZE)[:, None] + dim[None, :],
            mask=(own_sums > float("-inf"))[:, None] & (dim < VALUE_SIZE)[None, :],
            other=0.0,
        )
        weights = tl.exp2(own_sums - peak)  # every row sees itself, so one of the splits has a number
        total += tl.sum(weights, 0)
        result += tl.sum(weights[:, None] * mine, 0)
    out += ((batch * nodes + row // GROUP) * KV_HEADS + kv_head) * GROUP * VALUE_SIZE + row % GROUP * VALUE_SIZE
    tl.store(out + dim, (result / total).to(out.dtype.element_ty), mask=dim < VALUE_SIZE)
