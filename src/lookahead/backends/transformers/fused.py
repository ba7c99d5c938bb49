"""Norms and rotary embeddings in one kernel each, on a GPU: models run six and ten, which take longer than their sums.

They round where the model's own operations round. What stands for a module is chosen by trying.
"""

# Kernels are written in Triton's language, which mypy cannot check.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.language import constexpr  # type: ignore[import-untyped, import-not-found, unused-ignore]

MANNERS = ((True, 0.0), (False, 0.0), (False, 1.0))
"""How models norm: whether they round before the weight is multiplied, and what they add to the weight."""

_ROTARY = "apply_rotary_pos_emb"
"""The name of the function in the modules of transformers."""

_RENAMING = "transformers.utils.deprecation"


def fused_kind(module: torch.nn.Module, kind: Any) -> Any:
    """The class of what stands for `module` in a clone, which would be `kind` otherwise."""
    manner = _manner_of(module)
    if manner is not None:
        return _norming(kind, *manner)
    forward = _own_forward(kind)
    if isinstance(forward, FunctionType) and _ROTARY in forward.__code__.co_names:
        weight = next((weight for weight in module.parameters() if weight.is_floating_point()), None)
        original = forward.__globals__[_ROTARY]
        if weight is not None and not weight.is_meta and _rotates_alike(original, weight.dtype, weight.device):
            return _rotating(kind)
    return kind


def _own_forward(kind: Any) -> Any:
    """The forward pass of a class, out of the wrapper that renames arguments of earlier versions of transformers."""
    return unwrap(kind.forward, stop=lambda function: getattr(function, "__globals__", {}).get("__name__") != _RENAMING)


@torch.no_grad()
def _manner_of(module: torch.nn.Module) -> tuple[bool, float] | None:
    """Which of `MANNERS` gives the bits of a norm of 16 bits, but for the order in which a mean is summed."""
    weight = module._parameters.get("weight")
    epsilon = _epsilon_of(module)
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(epsilon, float) and len(module._parameters) == 1
    if not is_norm or weight is None or weight.is_meta or weight.dim() != 1 or weight.dtype.itemsize != 2:
        return None
    random = torch.Generator().manual_seed(0)
    sample, other = (torch.randn(rows, len(weight), generator=random).to(weight) for rows in (4, 1))
    probe = module.__class__.__new__(module.__class__)  # weights as they are drawn say too little
    vars(probe).update(vars(module), _parameters={"weight": torch.nn.Parameter(other[0])})
    expected = probe.forward(sample)  # without hooks
    for manner in MANNERS:
        found = rms_norm(sample, other[0], epsilon, *manner)
        if found.dtype == expected.dtype and int((found != expected).sum()) * 64 < found.numel():
            return manner
    return None


def _epsilon_of(module: torch.nn.Module) -> Any:
    attributes = vars(module)
    return attributes.get("variance_epsilon", attributes.get("eps"))


@cache
def _norming(kind: Any, rounds_first: bool, offset: float) -> Any:
    """The class `kind` of a norm, in one kernel."""

    def forward(self: Any, hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or named or hidden.dtype.itemsize != 2:
            return kind.forward(self, hidden, *more, **named)
        return rms_norm(hidden, self.weight, _epsilon_of(self), rounds_first, offset)

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _rotating(kind: Any) -> Any:
    """The class `kind` of an attention, whose forward pass finds another function under `_ROTARY`."""
    old = _own_forward(kind)
    places = {**old.__globals__, _ROTARY: partial(_rotated, old.__globals__[_ROTARY])}
    forward = FunctionType(old.__code__, places, old.__name__, old.__defaults__, old.__closure__)
    forward.__kwdefaults__ = old.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward})


def _rotated(original: Callable[..., Any], query: Any, key: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
    tensors = (query, key, cos, sin)
    is_known = not more and not named and [states.dim() for states in tensors] == [4, 4, 3, 3]
    if not is_known or len({states.dtype for states in tensors}) > 1:
        return original(*tensors, *more, **named)
    return rotate(*tensors)


@cache
@torch.no_grad()
def _rotates_alike(original: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `rotate` gives the bits of a function, for random states. Tried once, not for each layer."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 64), (2, 2, 3, 64), (2, 3, 64), (2, 3, 64))
    sample = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    try:
        return all(map(torch.equal, rotate(*sample), original(*sample)))
    except Exception:  # whatever it wants is not what it is given here
        return False


def rms_norm(hidden: Any, weight: Any, epsilon: float, rounds_first: bool, offset: float) -> torch.Tensor:
    """`hidden` `[..., size]` over the root of its mean square, times `weight` `[size]` and `offset`; see `MANNERS`."""
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    dtype = torch.promote_types(hidden.dtype, weight.dtype) if rounds_first else hidden.dtype
    output = torch.empty_like(rows, dtype=dtype)
    size = rows.shape[1]
    block = triton.next_power_of_2(size)
    options = {"num_warps": min(max(block // 512, 1), 8), "enable_fp_fusion": False}
    with torch.cuda.device_of(rows):
        _norm_kernel[len(rows),](rows, weight, output, epsilon, size, block, rounds_first, offset, **options)
    return output.view(hidden.shape)


@triton.jit
def _norm_kernel(
    hidden, weight, output, epsilon, SIZE: constexpr, BLOCK: constexpr, ROUNDS_FIRST: constexpr, OFFSET: constexpr
):
    place = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * SIZE
    states = tl.load(hidden + start + place, mask=place < SIZE, other=0.0)
    wide = states.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    if ROUNDS_FIRST:
        wide = wide.to(states.dtype).to(tl.float32)
    factor = tl.load(weight + place, mask=place < SIZE, other=0.0).to(tl.float32) + OFFSET
    tl.store(output + start + place, (wide * factor).to(output.dtype.element_ty), mask=place < SIZE)


def rotate(query: Any, key: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embeddings of queries and keys `[batch, heads, nodes, size]` by `cos` and `sin` `[batch, nodes, part]`.

    The first half of a part is turned against the second one; what lies behind the part stays.
    """
    states = [given.transpose(1, 2).contiguous() for given in (query, key)]  # as they come from the projections
    angles = [given.expand(len(query), -1, -1).contiguous() for given in (cos, sin)]
    outputs = [torch.empty_like(given) for given in states]
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
    turns = place < PART
    is_first = place < PART // 2
    partner = tl.where(is_first, place + PART // 2, place - PART // 2)
    states = tl.load(source + start + place, mask=place < SIZE, other=0.0)
    others = tl.load(source + start + partner, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * PART + place, mask=turns, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * PART + place, mask=turns, other=0.0).to(tl.float32)
    # Each product is rounded, as are those of the operations in place of which this stands.
    along = (states.to(tl.float32) * cosine).to(states.dtype).to(tl.float32)
    across = (tl.where(is_first, -others, others) * sine).to(states.dtype).to(tl.float32)
    tl.store(target + start + place, tl.where(turns, (along + across).to(states.dtype), states), mask=place < SIZE)
