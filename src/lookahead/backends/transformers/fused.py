"""Fused kernels for norms, rotary embeddings and gates on a GPU, where models launch six, ten and two kernels.

They round at the same points as the model's own operations. Trials choose the replacement of a module.
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
from triton.language.extra import libdevice  # type: ignore[import-untyped, import-not-found, unused-ignore]

MANNERS = ((True, 0.0), (False, 0.0), (False, 1.0))
"""Variants of RMS norms: whether they round before the multiplication by the weight, and an offset of the weight."""

_ROTARY = "apply_rotary_pos_emb"
"""Name of the function in the modules of transformers."""

_RENAMING = "transformers.utils.deprecation"
"""Module of the wrapper that renames arguments of earlier versions."""


def fused_kind(module: torch.nn.Module, kind: Any) -> Any:
    """Return the class that replaces `module` in a clone; `kind` if there is no fused one."""
    manner = _manner_of(module)
    if manner is not None:
        return _fused_norm(kind, *manner)
    forward = _own_forward(kind)
    if isinstance(forward, FunctionType) and _ROTARY in forward.__code__.co_names:
        weight = next((weight for weight in module.parameters() if weight.is_floating_point()), None)
        original = forward.__globals__[_ROTARY]
        if weight is not None and not weight.is_meta and _rotates_alike(original, weight.dtype, weight.device):
            return _fused_attention(kind)
    if _is_gated(forward):
        weight = getattr(module.gate_proj, "weight", None)
        is_plain = isinstance(weight, torch.Tensor) and not weight.is_meta and weight.dtype.itemsize == 2
        if is_plain and _gates_alike(module.act_fn, weight):
            return _fused_gate(kind)
    return kind


def _own_forward(kind: Any) -> Any:
    """Return the forward pass of a class without transformers' wrapper that renames arguments."""
    return unwrap(kind.forward, stop=lambda function: getattr(function, "__globals__", {}).get("__name__") != _RENAMING)


@torch.no_grad()
def _manner_of(module: torch.nn.Module) -> tuple[bool, float] | None:
    """Return the variant in `MANNERS` of a 16-bit norm, by a comparison of bits; the sum of its mean may differ."""
    weight = module._parameters.get("weight")
    epsilon = _epsilon_of(module)
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(epsilon, float) and len(module._parameters) == 1
    if not is_norm or weight is None or weight.is_meta or weight.dim() != 1 or weight.dtype.itemsize != 2:
        return None
    random = torch.Generator().manual_seed(0)
    sample, other = (torch.randn(rows, len(weight), generator=random).to(weight) for rows in (4, 1))
    probe = module.__class__.__new__(module.__class__)  # with random weights: initial ones hide differences
    vars(probe).update(vars(module), _parameters={"weight": torch.nn.Parameter(other[0])})
    expected = probe.forward(sample)  # without hooks
    for manner in MANNERS:
        actual = rms_norm(sample, other[0], epsilon, *manner)
        if actual.dtype == expected.dtype and int((actual != expected).sum()) * 64 < actual.numel():
            return manner
    return None


def _epsilon_of(module: torch.nn.Module) -> Any:
    attributes = vars(module)
    return attributes.get("variance_epsilon", attributes.get("eps"))


@cache
def _fused_norm(kind: Any, rounds_first: bool, offset: float) -> Any:
    """Return a subclass of a norm class `kind` with the fused kernel."""

    def forward(self: Any, hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or named or hidden.dtype.itemsize != 2:
            return kind.forward(self, hidden, *more, **named)
        return rms_norm(hidden, self.weight, _epsilon_of(self), rounds_first, offset)

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _fused_attention(kind: Any) -> Any:
    """Return a subclass of an attention class `kind` with the fused rotary embeddings."""
    old = _own_forward(kind)
    namespace = {**old.__globals__, _ROTARY: partial(_rotated, old.__globals__[_ROTARY])}
    forward = FunctionType(old.__code__, namespace, old.__name__, old.__defaults__, old.__closure__)
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
    """Return whether `rotate` has the bits of a function for random states; tried once for all layers."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 64), (2, 2, 3, 64), (2, 3, 64), (2, 3, 64))
    sample = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    try:
        return all(map(torch.equal, rotate(*sample), original(*sample)))
    except Exception:  # it has another signature
        return False


def _gated_forward(self: Any, x: torch.Tensor) -> Any:
    """Compute the gated layer of transformers' Llama and others, operation for operation."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504


def _is_gated(forward: Any) -> bool:
    """Return whether a function has the instructions of `_gated_forward`."""
    code, own = getattr(forward, "__code__", None), _gated_forward.__code__
    return code is not None and (code.co_code, code.co_names) == (own.co_code, own.co_names)


@torch.no_grad()
def _gates_alike(activation: Any, weight: Any) -> bool:
    """Return whether `gate` has the bits of an activation and a product for every number of a 16-bit type."""
    if not isinstance(activation, torch.nn.Module) or activation._forward_hooks or activation._forward_pre_hooks:
        return False
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(weight.dtype)
    numbers = numbers[numbers.isfinite()].to(weight.device)
    others = torch.randn(len(numbers), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        return torch.equal(gate(numbers, others), activation(numbers) * others)
    except Exception:  # it is no function of single numbers
        return False


@cache
def _fused_gate(kind: Any) -> Any:
    """Return a subclass of a gated layer `kind` with the fused activation and product."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.dtype.itemsize != 2:
            return kind.forward(self, x)
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))

    return type(kind.__name__, (kind,), {"forward": forward})


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
    """Return the RMS norm of `hidden` `[..., size]` with `weight` `[size]` plus `offset`; see `MANNERS`."""
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
    turns = place < PART
    is_first = place < PART // 2
    partner = tl.where(is_first, place + PART // 2, place - PART // 2)
    states = tl.load(source + start + place, mask=place < SIZE, other=0.0)
    others = tl.load(source + start + partner, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * PART + place, mask=turns, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * PART + place, mask=turns, other=0.0).to(tl.float32)
    # Each product is rounded, as in the separate operations.
    cosines = (states.to(tl.float32) * cosine).to(states.dtype).to(tl.float32)
    across = (tl.where(is_first, -others, others) * sine).to(states.dtype).to(tl.float32)
    tl.store(target + start + place, tl.where(turns, (cosines + across).to(states.dtype), states), mask=place < SIZE)
