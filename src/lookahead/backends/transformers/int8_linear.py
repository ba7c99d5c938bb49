"""Linear layers for CPUs whose weights, and inputs, are rounded to eight bits."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.transformers.packed_linear import PackedLinear, PackedWeight
from lookahead.core.compiled import IS_COMPILED, compiled
from lookahead.errors import UnsupportedArgumentError

_LARGEST = 127
_ZERO = 128
"""What stands for 0 in an input of unsigned bytes, the kind that processors multiply."""

_TINY = 1e-30
"""The least scale: a row of zeros has none of its own."""

_ROWS_TRIED = (1, 2, 5, 16, 33)


class Int8Linear(PackedLinear):
    """A linear layer with a second copy of its weight in eight bits, one scale for each output.

    Each row of the input is rounded to eight bits as well, by a scale of its own (dynamic quantisation by token). So
    the results are not those of the layer that it stands for. But the sums are of whole numbers and have no rounding:
    a row has the same bits whatever rows come with it.
    """

    _packed_weight: Int8Weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows, scales = rounded_rows(input.reshape(-1, input.shape[-1]))
        output = self._packed_weight.product(rows).mul_(scales)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], output.shape[-1])

    def pack(self) -> None:
        """Round and pack the weight as it is now."""
        self._packed_weight = Int8Weight(self.weight)


class Int8Weight(PackedWeight):
    """A weight in eight bits, with a fingerprint that shows whether the original has changed.

    Args:
        weight: `[out_features, in_features]`, of floating-point numbers.
    """

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.float()
        self._scales = weight.abs().amax(dim=1).clamp_min_(_TINY).div_(_LARGEST)  # [out_features]
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        whole = weight.div(self._scales[:, None]).round_().to(torch.int8)
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(whole, None)
        return packed

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of `rounded_rows` times the weight, without their scales: `[rows, out_features]` float32."""
        weight = self.values, self._scales, self._zeros
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, _ZERO, *weight, None),
            *(1.0, 0, torch.float32, "none", [], ""),  # the result in float32, and nothing done to it
        )
        return product


def rounded_rows(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows `[rows, features]` of an input in bytes, 128 for 0, and their scales, `[rows, 1]` float32."""
    input = input.float()
    if IS_COMPILED and not input.requires_grad:
        whole, scales = torch.empty(input.shape, dtype=torch.uint8), torch.empty((len(input), 1))
        _round(input.contiguous().numpy(), whole.numpy(), scales.numpy())
        return whole, scales
    scales = torch.linalg.vector_norm(input, torch.inf, dim=-1, keepdim=True).clamp_min_(_TINY).div_(_LARGEST)
    return input.div(scales).round_().add_(_ZERO).to(torch.uint8), scales


def _round_rows(input: NDArray[np.float32], whole: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    """`rounded_rows` in a quarter of the time."""
    for row in range(input.shape[0]):
        largest = np.float32(0)
        for column in range(input.shape[1]):
            largest = max(largest, abs(input[row, column]))
        scale = max(largest, np.float32(_TINY)) / np.float32(_LARGEST)
        scales[row, 0] = scale
        for column in range(input.shape[1]):
            whole[row, column] = np.uint8(np.int32(np.rint(input[row, column] / scale)) + _ZERO)


_round = compiled(_round_rows, releases_gil=True, vectorizes=True)


def check_int8() -> None:
    """Raise an `UnsupportedArgumentError` if products of bytes are not to be had here, or not exact."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        reason = "this build of torch has no such products"
    elif not products_are_exact():
        reason = "products of bytes overflow on this processor, which has no VNNI instructions"
    else:
        return
    raise UnsupportedArgumentError(f"pack_weights='int8' is not possible: {reason}; use pack_weights=True or False")


@cache
def products_are_exact() -> bool:
    """Whether sums of the largest products are right; processors before VNNI add them up in 16 bits."""
    features = 96
    weight = torch.full((48, features), float(_LARGEST))
    weight[1::2] *= -1
    packed = Int8Weight(weight)
    for rows in _ROWS_TRIED:
        whole = torch.full((rows, features), 2 * _LARGEST + 1, dtype=torch.uint8)
        whole[1::2, ::2] = 1
        expected = (whole.double() - _ZERO) @ weight.double().T
        if not torch.equal(packed.product(whole).double(), expected):
            return False
    return True
