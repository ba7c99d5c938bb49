"""Linear layers for CPUs with their weights in the order in which the processor multiplies them."""

from __future__ import annotations

import torch

from lookahead.errors import UnsupportedArgumentError

_ROWS = 16
"""Rows that the order is chosen for; it serves other numbers of rows as well."""

_SAMPLES = 64


class PackedLinear(torch.nn.Linear):
    """A linear layer with a second, packed copy of its weight.

    A plain weight is rearranged by each product anew, which takes longer than the product of a few rows with it.
    In bfloat16 the results are the same bits; in float32 sums are rounded in another order.
    """

    _packed: torch.Tensor
    _sample: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return output

    def is_current(self) -> bool:
        """Whether the weight still holds what was packed, as far as samples of it tell."""
        return torch.equal(_sample(self.weight), self._sample)


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


def pack(linear: torch.nn.Linear) -> PackedLinear:
    """A packed layer with the weight of `linear`; its attributes are for the caller to take over."""
    packed = PackedLinear.__new__(PackedLinear)
    weight = linear.weight.detach()
    vars(packed)["_packed"] = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    vars(packed)["_sample"] = _sample(weight).clone()
    return packed


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some values from all over a weight: a change of the whole of it, as merging an adapter makes, shows there."""
    values = weight.detach().flatten()
    return values[:: max(1, values.numel() // _SAMPLES)]
