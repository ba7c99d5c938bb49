"""Linear layers for CPUs with weights in the order in which the processor multiplies them, where that is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.machine import process_clock
from lookahead.backends.transformers.findings import recall, remember
from lookahead.backends.transformers.snapshots import fingerprint

_ROWS = 16
"""Rows that the order is chosen for; it serves other numbers of rows as well."""

PACKED_WEIGHT = "_packed_weight"
"""The attribute that is a `PackedLinear`'s own; all others are those of the layer that it stands for."""


class _Packed(NamedTuple):
    """A weight in another order, and what tells whether the original has changed since.

    Nothing that torch notes of a tensor proves that its values are what they were. Writing through `.data`, a numpy
    array or shared memory leaves version counter and address alone, tensors made in inference mode have no version,
    and memory that was freed is handed out again at the same address. So it is the bits themselves that are compared,
    by their fingerprint: a pass over the weights for each call, about as long as a step of one token. If they are
    equal, it does not matter what happened to the tensor.

    Attributes:
        values: What the product is computed with; opaque.
        kind: Shape and type of the original.
        bits: Its fingerprint.
        least: Rows from which on products are computed with it.
    """

    values: torch.Tensor
    kind: tuple[object, ...]
    bits: NDArray[np.uint64]
    least: int


class PackedLinear(torch.nn.Linear):
    """A linear layer with a second, packed copy of its weight, which `can_pack`.

    A plain weight is rearranged by each product anew, which takes longer than the product of a few rows with it.
    In bfloat16 the results are the same bits; in float32 sums are rounded in another order.
    """

    _packed_weight: _Packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if input.numel() < self._packed_weight.least * input.shape[-1]:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        return packed_product(input, self._packed_weight.values, self.bias)

    def is_current(self) -> bool:
        """Whether the packed copy holds what the weight holds now; reads all of the weight."""
        packed: _Packed | None = vars(self).get(PACKED_WEIGHT)
        if packed is None or packed.kind != (self.weight.shape, self.weight.dtype):
            return False
        return np.array_equal(packed.bits, fingerprint(self.weight))

    def pack(self, least: int) -> None:
        """Pack the weight as it is now, for products of so many rows or more."""
        weight = self.weight.detach()
        vars(self)[PACKED_WEIGHT] = _Packed(pack(weight), (weight.shape, weight.dtype), fingerprint(weight), least)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out_features, in_features]` in the other order; opaque."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def packed_product(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., in_features]` to `[..., out_features]`, by what `pack` made."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return output


def can_pack(module: torch.nn.Module) -> bool:
    """Whether `module` is a plain linear layer on a CPU, in a number type that its processor multiplies."""
    if type(module) is not torch.nn.Linear:
        return False
    weight = module.weight
    if type(weight) is not torch.nn.Parameter or weight.device.type != "cpu" or "forward" in vars(module):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


Layers = Mapping[tuple[int, ...], Sequence[torch.nn.Linear]]
"""Linear layers by the shape of their weights."""

_TIMED_ROWS = (1, 2, 4, 8, 16)
"""Rows of the products: one of a plain step, more of a step with a draft."""

_MOST_BYTES = 1 << 24
"""Weights of a shape that are timed: few enough to take a fraction of a second."""

_MOST_ROUNDS = 6
_LEAST_ROUNDS = 2
_LONG_ENOUGH = 0.05
"""CPU seconds after which no further round begins."""

_WORTH = 0.97
"""Most time of packed products over that of plain ones: each call reads all packed weights once more."""

_log = logging.getLogger(__name__)


def fastest_packing(model: PreTrainedModel) -> int:
    """From how many rows on products of `model` are to be of packed weights, so that no step takes longer than with
    plain ones.

    Timed once for the shapes and types of a model's layers, and kept for the machine, the libraries and the number of
    threads (see `findings`).

    Returns:
        1 for all products, as for a model that has nothing to pack; 0 for none.
    """
    layers = _layers_by_shape(model)
    if not layers:
        return 1
    counts = sorted([*shape, len(found)] for shape, found in layers.items())
    about = {"kind": "rows of packed products", "dtype": str(model.dtype), "layers": counts}
    least = recall(about)
    if least not in (0, *_TIMED_ROWS):
        least = 0
        seconds = product_seconds(layers)
        _log.debug("seconds of plain and of packed products, by rows: %s", seconds)
        for rows, (plain, packed) in reversed(seconds.items()):
            if packed > _WORTH * plain:
                break
            least = rows
        remember(about, least)
    _log.debug("pack_weights=True: products of %s are packed from %s rows on; 0 for none", type(model).__name__, least)
    return int(least)


def _layers_by_shape(model: PreTrainedModel) -> dict[tuple[int, ...], list[torch.nn.Linear]]:
    """The layers that can be packed."""
    layers: dict[tuple[int, ...], list[torch.nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and can_pack(module):
            layers.setdefault(tuple(module.weight.shape), []).append(module)
    return layers


def product_seconds(layers: Layers) -> dict[int, tuple[float, float]]:
    """CPU seconds of one product with each layer of a model, plain and packed, by rows, ascending.

    Of those of a shape it is the least of a few times, taken in turns: other programs only add.
    """
    multiply: tuple[Callable[..., torch.Tensor], ...] = torch.nn.functional.linear, packed_product
    seconds = np.zeros((len(_TIMED_ROWS), len(multiply)))
    for alike in layers.values():
        weights = _sample(alike)
        used = weights, [pack(weight) for weight in weights]
        least = np.full(seconds.shape, np.inf)
        begin = process_clock()
        for finished in range(_MOST_ROUNDS):
            if finished >= _LEAST_ROUNDS and process_clock() - begin > _LONG_ENOUGH:
                break
            for place, kind in np.ndindex(seconds.shape):
                inputs = torch.ones(1, _TIMED_ROWS[place], weights[0].shape[1], dtype=weights[0].dtype)
                start = process_clock()
                for weight in used[kind]:
                    multiply[kind](inputs, weight)
                least[place, kind] = min(least[place, kind], process_clock() - start)
        seconds += least * sum(layer.weight.numel() for layer in alike) / sum(weight.numel() for weight in weights)
    return {rows: (plain, packed) for rows, (plain, packed) in zip(_TIMED_ROWS, seconds.tolist(), strict=True)}


def _sample(layers: Sequence[torch.nn.Linear]) -> list[torch.Tensor]:
    """Weights of the first layers, or the first rows of one, up to `_MOST_BYTES`."""
    first = layers[0].weight
    if first.nbytes > _MOST_BYTES:
        return [first.detach()[: max(1, len(first) * _MOST_BYTES // first.nbytes)]]
    return [layer.weight.detach() for layer in layers[: _MOST_BYTES // first.nbytes]]
