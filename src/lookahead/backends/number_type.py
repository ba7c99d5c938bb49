"""Choice between the 16-bit type of a model's files and float32, on a CPU."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear

from lookahead.backends.machine import free_bytes

_ROWS = 8
"""Rows of the timed product: nodes of a typical step."""

_ELEMENTS = 2**24
"""Most weights of the timed product."""

_REPEATS = 5
"""Timed products of each type; the fastest one counts."""

_GAIN = 1.2
"""Smallest ratio of the times that decides for float32. Processors with bfloat16 instructions have at most 0.85."""


def use_faster_type(model: Any) -> str | None:
    """Convert a 16-bit model to float32 if products in float32 are faster on this processor.

    Processors without instructions for a 16-bit type convert each weight in each product of several rows. The values
    of the weights stay the same.

    Args:
        model: Any model; only those of transformers on a CPU are converted.

    Returns:
        Description of the choice in one line, or `None` if the model stays as it is.
    """
    if not isinstance(model, torch.nn.Module) or getattr(model, "hf_quantizer", None) is not None:
        return None
    layers = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = next(iter(dtypes), None)
    if len(dtypes) > 1 or dtype not in (torch.bfloat16, torch.float16) or not layers:
        return None
    size = sum(parameter.nbytes for parameter in model.parameters())
    if any(layer.device.type != "cpu" for layer in layers) or free_bytes(layers[0].device) < 2 * size:
        return None
    gain = _gain(max(layers, key=torch.Tensor.numel).detach())
    if gain < _GAIN:
        return None
    model.to(torch.float32)
    model.config.dtype = torch.float32
    name = str(dtype).removeprefix("torch.")
    return f"float32: steps are {gain:.1f} times as fast on this CPU as in {name}, and exact; --dtype {name} keeps it"


def _gain(weight: torch.Tensor) -> float:
    """Return the time of a product with 16-bit weights, in times of the same product in float32."""
    part = weight[: max(_ELEMENTS // weight.shape[1], 1)]
    return _seconds(part) / _seconds(part.float())


@torch.inference_mode()
def _seconds(weight: torch.Tensor) -> float:
    rows = torch.ones(_ROWS, weight.shape[1], dtype=weight.dtype)
    times = []
    for _ in range(_REPEATS + 1):  # the first one prepares the kernel
        begin = perf_counter()
        linear(rows, weight)
        times.append(perf_counter() - begin)
    return min(times[1:])
