"""Modules of a clone with fused kernels, where models launch six for a norm, ten for rotary embeddings, two for a gate.

Trials choose the replacement of a module. A norm also computes the residual sum before it, and rotary embeddings of a
fixed pass write keys and values to the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch

from lookahead.backends.transformers import fused_kernels
from lookahead.backends.transformers.cache_names import CACHE_ARGUMENTS
from lookahead.backends.transformers.fused_kernels import LateKey
from lookahead.backends.transformers.row_pool import RowPool
from lookahead.errors import not_of_signal

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
            return _fused_attention(kind, _writes_turned(module, forward))
    if _is_gated(forward):
        weight = getattr(module.gate_proj, "weight", None)
        is_plain = isinstance(weight, torch.Tensor) and not weight.is_meta and weight.dtype.itemsize == 2
        if is_plain and _gates_alike(module.act_fn, weight):
            return _fused_gate(kind)
    return kind


def _holds(trial: Callable[[], bool]) -> bool:
    """Return the result of a trial; false if the module has another signature, or uses its inputs in another way."""
    try:
        return trial()
    except Exception as error:
        not_of_signal(error)
        return False


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
    sample, other = (torch.randn(rows, len(weight), generator=random, device="cpu").to(weight) for rows in (4, 1))
    probe = module.__class__.__new__(module.__class__)  # with random weights: initial ones hide differences
    vars(probe).update(vars(module), _parameters={"weight": torch.nn.Parameter(other[0])})
    expected = probe.forward(sample)  # without hooks
    for manner in MANNERS:
        actual = fused_kernels.rms_norm(sample, other[0], epsilon, *manner)
        if actual.dtype == expected.dtype and int((actual != expected).sum()) * 64 < actual.numel():
            return manner
    return None


def _epsilon_of(module: torch.nn.Module) -> Any:
    attributes = vars(module)
    return attributes.get("variance_epsilon", attributes.get("eps"))


@cache
def _fused_norm(kind: Any, rounds_first: bool, offset: float) -> Any:
    """Return a subclass of a norm class `kind` with the fused kernel."""

    def forward(self: Any, hidden: Any, *more: Any, **named: Any) -> Any:
        norm = self.weight, _epsilon_of(self), rounds_first, offset
        if isinstance(hidden, LateSum):
            if not more and not named and hidden.can_join:
                return hidden.normed(*norm)
            hidden = hidden.total()
        if more or named or hidden.dtype.itemsize != 2:
            return kind.forward(self, hidden, *more, **named)
        return fused_kernels.rms_norm(hidden, *norm)

    return type(kind.__name__, (kind,), {"forward": forward})


class LateSum:
    """A residual sum in a decoder layer, in place of a tensor: the norm that reads it first computes it."""

    __slots__ = ("_states", "_update")

    def __init__(self, states: torch.Tensor, update: Any = None) -> None:
        self._states = states
        self._update = update

    def __add__(self, update: Any) -> LateSum:
        return LateSum(self.total(), update)

    __radd__ = __add__

    @property
    def can_join(self) -> bool:
        """Whether a sum in a 16-bit type is left."""
        states, update = self._states, self._update
        is_alike = isinstance(update, torch.Tensor) and (update.shape, update.dtype) == (states.shape, states.dtype)
        return is_alike and states.dtype.itemsize == 2

    def total(self) -> Any:
        """Return the sum."""
        if self._update is not None:
            self._states, self._update = self._states + self._update, None
        return self._states

    def normed(self, *norm: Any) -> torch.Tensor:
        """Return the norm of the sum; `norm` has the other arguments of `add_norm`."""
        self._states, output = fused_kernels.add_norm(self._states, self._update, *norm)
        self._update = None
        return output


@torch.no_grad()
def joined_kind(module: torch.nn.Module, kind: Any) -> Any:
    """Return the class of a decoder layer whose norms compute its sums; `kind` if a trial has other bits.

    Such a layer returns a `LateSum`, for the first norm of the next layer or the norm after all layers.
    """
    norms = {name: (child, manner) for name, child in module.named_children() if (manner := _manner_of(child))}
    if "self_attn" not in module._modules or not norms:
        return kind
    fused: dict[str, Any] = {}
    for name, (child, manner) in norms.items():
        own: Any = type(child)
        fused[name] = own.__new__(_fused_norm(own, *manner))
        vars(fused[name]).update(vars(child))
    weight: Any = next(iter(fused.values())).weight
    random = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 3, len(weight), generator=random, device="cpu").to(weight)
    expected, actual = (_without_products(module, fused, one) for one in (kind, _joined_layer(kind)))
    alike = _holds(lambda: torch.equal(actual.forward(sample).total(), expected.forward(sample)))
    return type(actual) if alike else kind


@cache
def _joined_layer(kind: Any) -> Any:
    """Return a subclass of a decoder layer `kind` that takes and returns a `LateSum`."""

    def forward(self: Any, hidden_states: Any, *more: Any, **named: Any) -> Any:
        late = hidden_states if isinstance(hidden_states, LateSum) else LateSum(hidden_states)
        return kind.forward(self, late, *more, **named)

    return type(kind.__name__, (kind,), {"forward": forward})


def _without_products(layer: torch.nn.Module, norms: dict[str, Any], kind: Any) -> Any:
    """Return a decoder layer of another class with some norms, in which all other modules halve their input."""
    probe = kind.__new__(kind)
    others = {name: _Half(name == "self_attn") for name in layer._modules if name not in norms}
    vars(probe).update(vars(layer), _modules={**others, **norms})
    return probe


class _Half(torch.nn.Module):
    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self._is_attention = is_attention

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        half = hidden_states * 0.5
        return (half, None) if self._is_attention else half


@cache
def _fused_attention(kind: Any, writes: bool) -> Any:
    """Return a subclass of an attention class `kind` with the fused rotary embeddings.

    Args:
        kind: The class.
        writes: Whether the kernel also writes to the cache in fixed passes.
    """
    old = _own_forward(kind)
    plain, writing = (_with_rotary(old, partial(rotated, old.__globals__[_ROTARY])) for rotated in (_rotated, _late))
    name = next((name for name in CACHE_ARGUMENTS if name in old.__code__.co_varnames), "")

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        cache = named.get(name)
        if isinstance(cache, RowPool) and cache.columns is not None:
            return writing(self, *args, **{**named, name: _WritingCache(cache)})
        return plain(self, *args, **named)

    return type(kind.__name__, (kind,), {"forward": forward if writes else plain})


def _with_rotary(forward: FunctionType, rotary: Callable[..., Any]) -> FunctionType:
    """Return a forward pass with another function of rotary embeddings."""
    namespace = {**forward.__globals__, _ROTARY: rotary}
    changed = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _is_known(tensors: tuple[Any, ...], more: Any, named: Any) -> bool:
    """Return whether the kernels support the arguments of a function of rotary embeddings."""
    is_known = not more and not named and [states.dim() for states in tensors] == [4, 4, 3, 3]
    return is_known and len({states.dtype for states in tensors}) == 1


def _rotated(original: Callable[..., Any], query: Any, key: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
    tensors = (query, key, cos, sin)
    return fused_kernels.rotate(*tensors) if _is_known(tensors, more, named) else original(*tensors, *more, **named)


def _late(original: Callable[..., Any], query: Any, key: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
    tensors = (query, key, cos, sin)
    if not _is_known(tensors, more, named):
        return original(*tensors, *more, **named)
    rotated = torch.empty_like(query.transpose(1, 2).contiguous()).transpose(1, 2)
    return rotated, LateKey(*tensors, rotated)


class _WritingCache:
    """A cache in a fixed pass that also takes keys that are not rotated yet."""

    def __init__(self, cache: RowPool) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: Any, value: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        """See `RowPool`."""
        if not isinstance(key, LateKey):
            return self._cache.update(key, value, layer_idx, *more, **named)
        layer = self._cache.layers[layer_idx]
        fused_kernels.rotate_into(key, value, layer.keys, layer.values, self._cache.columns)
        return self._cache.visible(layer)


class _Reached(Exception):
    """The end of a trial."""


class _Reader:
    """A cache that ends a trial."""

    def update(self, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        raise _Reached if isinstance(key, LateKey) and isinstance(value, torch.Tensor) else TypeError


@torch.no_grad()
def _writes_turned(module: Any, forward: FunctionType) -> bool:
    """Return whether a layer gives rotated keys to its cache before it reads anything rotated."""
    names = [name for name in CACHE_ARGUMENTS if name in forward.__code__.co_varnames]
    probing = _with_rotary(forward, lambda query, key, cos, sin: (None, LateKey(query, key, cos, sin, None)))
    try:
        size = module.config.hidden_size
        weight = next(iter(module.parameters()))
        states, angle = (weight.new_zeros(1, 2, width) for width in (size, module.head_dim))
        arguments: dict[str, Any] = {"attention_mask": None, "position_embeddings": (angle, angle)}
        probing(module, hidden_states=states, **arguments, **{names[0]: _Reader()})
    except _Reached:
        return _writes_alike(forward.__globals__[_ROTARY], weight.dtype, weight.device)
    except Exception as error:  # it has other arguments, or reads a rotated tensor
        not_of_signal(error)
    return False


def _turned_sample(dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Return random queries, keys, values, cosines and sines for a trial."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 64), (2, 2, 3, 64), (2, 2, 3, 48), (2, 3, 64), (2, 3, 64))
    return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


@cache
@torch.no_grad()
def _writes_alike(original: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `rotate_into` has the bits of a function and of copies to a cache; tried once for all layers."""
    query, key, value, cos, sin = _turned_sample(dtype, device)
    columns = torch.tensor([5, 1, 6]).to(device)
    pairs = [[states.new_zeros(2, 2, 9, states.shape[3]) for states in (key, value)] for _ in range(2)]

    def writes() -> bool:
        rotated, late = _late(original, query, key, cos, sin)
        fused_kernels.rotate_into(late, value, pairs[0][0], pairs[0][1], columns)
        expected, turned = original(query, key, cos, sin)
        for cached, states in zip(pairs[1], (turned, value), strict=True):
            cached.index_copy_(2, columns, states)
        return torch.equal(rotated, expected) and all(map(torch.equal, *pairs))

    return _holds(writes)


@cache
@torch.no_grad()
def _rotates_alike(original: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `rotate` has the bits of a function for random states; tried once for all layers."""
    query, key, _, *angles = _turned_sample(dtype, device)
    sample = query, key, *angles
    return _holds(lambda: all(map(torch.equal, fused_kernels.rotate(*sample), original(*sample))))


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
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(weight.dtype)
    numbers = numbers[numbers.isfinite()].to(weight.device)
    random = torch.Generator().manual_seed(0)
    others = torch.randn(len(numbers), generator=random, device="cpu").to(weight)
    return _holds(lambda: torch.equal(fused_kernels.gate(numbers, others), activation(numbers) * others))


@cache
def _fused_gate(kind: Any) -> Any:
    """Return a subclass of a gated layer `kind` with the fused activation and product."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.dtype.itemsize != 2:
            return kind.forward(self, x)
        return self.down_proj(fused_kernels.gate(self.gate_proj(x), self.up_proj(x)))

    return type(kind.__name__, (kind,), {"forward": forward})
