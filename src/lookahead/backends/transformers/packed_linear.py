"""Linear layers for CPUs with weights packed in the processor's order, where that is faster."""

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
"""Number of rows that determines the order; it supports other numbers too."""

PACKED_WEIGHT = "_packed_weight"
"""Attribute of a `PackedLinear` with its packed weight; all other attributes are shared with the original layer."""


class _Packed(NamedTuple):
    """Packed weight, and a fingerprint of the original.

    Torch cannot prove that a tensor is unchanged: writes through `.data`, numpy or shared memory change neither version
    nor address, inference tensors have no version, and freed addresses are reused. So each call compares fingerprints
    of the weights, which takes about as long as a plain step.

    Attributes:
        values: Packed values; opaque.
        kind: Shape and type of the original.
        bits: Fingerprint of the original.
        min_rows: Smallest number of rows for products with it.
    """

    values: torch.Tensor
    kind: tuple[object, ...]
    bits: NDArray[np.uint64]
    min_rows: int


class PackedLinear(torch.nn.Linear):
    """Linear layer with a packed copy of its weight.

    oneDNN repacks a plain weight for each product, which takes longer than the product of a few rows. In bfloat16 the
    results have equal bits; in float32 sums have another order.
    """

    _packed_weight: _Packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        if input.numel() < self._packed_weight.min_rows * input.shape[-1]:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        return packed_product(input, self._packed_weight.values, self.bias)

    def is_current(self) -> bool:
        """Return whether the packed copy equals the weight, by its fingerprint."""
        packed: _Packed | None = vars(self).get(PACKED_WEIGHT)
        if packed is None or packed.kind != (self.weight.shape, self.weight.dtype):
            return False
        return np.array_equal(packed.bits, fingerprint(self.weight))

    def pack(self, min_rows: int) -> None:
        """Pack the current weight, for products of at least `min_rows` rows."""
        weight = self.weight.detach()
        vars(self)[PACKED_WEIGHT] = _Packed(pack(weight), (weight.shape, weight.dtype), fingerprint(weight), min_rows)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight `[out_features, in_features]`; the result is opaque."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def packed_product(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `[..., in_features]` by a packed weight, to `[..., out_features]`."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return output


def can_pack(module: torch.nn.Module) -> bool:
    """Return whether `module` is a plain linear layer on a CPU that supports its number type."""
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
"""Numbers of rows to time: one row of a plain step, more rows with a draft."""

_MAX_BYTES = 1 << 24
"""Timed weights of a shape in bytes: few enough to take a fraction of a second."""

_MAX_ROUNDS = 6
_MIN_ROUNDS = 2
_LONG_ENOUGH = 0.05
"""CPU seconds until the last round begins."""

_WORTH = 0.97
"""Largest ratio of packed to plain times that pays: each call also checks all packed weights."""

_log = logging.getLogger(__name__)


def fastest_packing(model: PreTrainedModel) -> int:
    """Return the smallest number of rows for products with packed weights, so that no step becomes slower.

    It is timed once for the shapes and types of a model's layers, and stored for the machine, the libraries and the
    number of threads (see `findings`).

    Returns:
        1 for all products, also without any layer to pack; 0 for none.
    """
    layers = _layers_by_shape(model)
    if not layers:
        return 1
    counts = sorted([*shape, len(group)] for shape, group in layers.items())
    about = {"kind": "rows of packed products", "dtype": str(model.dtype), "layers": counts}
    min_rows = recall(about)
    if min_rows not in (0, *_TIMED_ROWS):
        min_rows = 0
        seconds = product_seconds(layers)
        _log.debug("seconds of plain and of packed products, by rows: %s", seconds)
        for rows, (plain, packed) in reversed(seconds.items()):
            if packed > _WORTH * plain:
                break
            min_rows = rows
        remember(about, min_rows)
    _log.debug(
        "pack_weights=True: products of %s are packed from %s rows on; 0 for none", type(model).__name__, min_rows
    )
    return int(min_rows)


def _layers_by_shape(model: PreTrainedModel) -> dict[tuple[int, ...], list[torch.nn.Linear]]:
    """Return the layers that can be packed, by shape."""
    layers: dict[tuple[int, ...], list[torch.nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and can_pack(module):
            layers.setdefault(tuple(module.weight.shape), []).append(module)
    return layers


def product_seconds(layers: Layers) -> dict[int, tuple[float, float]]:
    """Return CPU seconds of one product with each layer of a model, plain and packed, by number of rows.

    Each time is the minimum of a few alternating runs, because other programs only add time.
    """
    multiply: tuple[Callable[..., torch.Tensor], ...] = torch.nn.functional.linear, packed_product
    seconds = np.zeros((len(_TIMED_ROWS), len(multiply)))
    for alike in layers.values():
        weights = _sample(alike)
        used = weights, [pack(weight) for weight in weights]
        shortest = np.full(seconds.shape, np.inf)
        begin = process_clock()
        for finished in range(_MAX_ROUNDS):
            if finished >= _MIN_ROUNDS and process_clock() - begin > _LONG_ENOUGH:
                break
            for place, kind in np.ndindex(seconds.shape):
                inputs = weights[0].new_ones(1, _TIMED_ROWS[place], weights[0].shape[1])
                start = process_clock()
                for weight in used[kind]:
                    multiply[kind](inputs, weight)
                shortest[place, kind] = min(shortest[place, kind], process_clock() - start)
        seconds += shortest * sum(layer.weight.numel() for layer in alike) / sum(weight.numel() for weight in weights)
    return {rows: (plain, packed) for rows, (plain, packed) in zip(_TIMED_ROWS, seconds.tolist(), strict=True)}


def _sample(layers: Sequence[torch.nn.Linear]) -> list[torch.Tensor]:
    """Return weights of the first layers, or the first rows of one, up to `_MAX_BYTES`."""
    first = layers[0].weight
    if first.nbytes > _MAX_BYTES:
        return [first.detach()[: max(1, len(first) * _MAX_BYTES // first.nbytes)]]
    return [layer.weight.detach() for layer in layers[: _MAX_BYTES // first.nbytes]]
