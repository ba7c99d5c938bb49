"""Linear layers for CPUs with their weights in the order in which the processor multiplies them."""

from __future__ import annotations

import numpy as np
import torch

from lookahead.backends.transformers.fingerprint import fingerprint
from lookahead.errors import UnsupportedArgumentError

_ROWS = 16
"""Rows that the order is chosen for; it serves other numbers of rows as well."""

SEVERAL_ROWS = "several rows"
"""What the choice of a packing says where only products of more than one row are of packed weights."""

PACKED_WEIGHT = "_packed_weight"
"""The attribute that is a `PackedLinear`'s own; all others are those of the layer that it stands for."""


class PackedLinear(torch.nn.Linear):
    """A linear layer with a second, packed copy of its weight.

    A plain weight is rearranged by each product anew, which takes longer than the product of a few rows with it.
    In bfloat16 the results are the same bits; in float32 sums are rounded in another order.
    """

    _packed_weight: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return packed_product(input, self._packed_weight.values, self.bias)

    def is_current(self) -> bool:
        """Whether the packed copy holds what the weight holds now; reads all of the weight."""
        packed = vars(self).get(PACKED_WEIGHT)
        return packed is not None and packed.is_of(self.weight)

    def pack(self) -> None:
        """Pack the weight as it is now."""
        vars(self)[PACKED_WEIGHT] = PackedWeight(self.weight)


class PackedForSeveralRows(PackedLinear):
    """One that multiplies a single row with the plain weight, where that is faster."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if input.numel() == input.shape[-1]:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        return super().forward(input)


class PackedWeight:
    """A weight in another order, with a fingerprint that shows whether the original has changed.

    Nothing that torch notes of a tensor proves that its values are what they were. Writing through `.data`, a numpy
    array or shared memory leaves version counter and address alone, tensors made in inference mode have no version,
    and memory that was freed is handed out again at the same address. So it is the bits themselves that are compared,
    by their fingerprint: a pass over the weights for each call, about as long as a step of one token. If they are
    equal, it does not matter what happened to the tensor.

    Args:
        weight: `[out_features, in_features]`, of a type that `can_pack` accepts.

    Attributes:
        values: What the product is computed with; opaque.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        self._kind = _kind(weight)
        self._fingerprint = fingerprint(weight)
        self.values = pack(weight)

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether `weight` holds the bits that were packed."""
        return self._kind == _kind(weight) and np.array_equal(self._fingerprint, fingerprint(weight))


def _kind(weight: torch.Tensor) -> tuple[object, ...]:
    return weight.shape, weight.dtype


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out_features, in_features]` in the other order; opaque."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def packed_product(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., in_features]` to `[..., out_features]`, by what `pack` made."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return output


def check_packing() -> None:
    """Raise an `UnsupportedArgumentError` if this build of torch cannot pack weights."""
    operators = torch.ops.mkldnn
    if not (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(operators, "_reorder_linear_weight")
    ):
        raise UnsupportedArgumentError(
            "pack_weights=True needs a build of torch with oneDNN, which this one is not; use pack_weights=False"
        )


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
