"""What steps are taken to cost before any was timed, by number type and instructions of the processor."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.core.cost_model import CostModel

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_CURVES = {
    ("float32", False): (1.0, 1.8, 1.8, 2.1, 2.8, 4.1, 6.7, 12.0),
    ("float32", True): (1.0, 1.05, 1.05, 1.15, 1.5, 2.6, 4.7, 9.0),
    ("AMX", False): (1.0, 1.04, 1.07, 1.08, 1.14, 1.26, 1.75, 2.9),
    ("AMX", True): (1.0, 1.02, 1.04, 1.07, 1.17, 1.43, 1.73, 2.6),
    ("oneDNN", False): (1.0, 1.04, 1.14, 1.3, 1.7, 2.5, 4.0, 7.2),
    ("oneDNN", True): (1.0, 1.05, 1.05, 1.2, 1.8, 2.9, 5.2, 9.8),
    ("rows", False): (1.0, 1.9, 3.6, 7.0, 14.0, 28.0, 56.0, 112.0),
    ("GGUF", False): (1.0, 1.65, 1.85, 2.35, 3.35, 5.6, 11.5, 23.0),
    ("GGUF quantised", False): (1.0, 1.2, 1.6, 2.3, 3.2, 5.5, 12.0, 24.0),
}
"""Time of a step of each of `_SIZES` nodes over that of one of one node, by kind of product and whether weights are
packed. Measured with one thread and random Llamas of half a billion weights: AMX on Sapphire Rapids; float32, oneDNN
(16 bits with AVX-512) on Zen 4; "rows", for 16 bits that a processor multiplies row by row, on Zen 3; GGUF,
the demonstration model in llama.cpp, on Zen 4."""

_THREADS = 4
"""Threads that share the arithmetic; more of them wait for memory, as a step of one node does from the first on."""


def first_guess(model: PreTrainedModel, pack_weights: bool | str) -> CostModel:
    """The cost of steps of `model`, to be corrected by the steps themselves.

    Args:
        model: On its device, in its type.
        pack_weights: See `LookaheadConfig.pack_weights`.
    """
    if model.config.model_type == "gguf":
        kind = model.products
    else:
        kind = _kind_of_product(model.dtype) if model.device.type == "cpu" else None
    if kind is None:
        return CostModel.prior()
    curve = _CURVES.get((kind, bool(pack_weights))) or _CURVES[kind, False]  # what cannot be packed runs as it is
    shared = min(torch.get_num_threads(), _THREADS)
    return CostModel(_SIZES, [1 + (cost - 1) / shared for cost in curve], [0.0] * len(_SIZES), pace=None)


def _kind_of_product(dtype: torch.dtype) -> str | None:
    """How this processor multiplies, as `_CURVES` calls it; `None` where torch does not say."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "float32"
    short, tiles = ("fp16", "amx_fp16") if dtype == torch.float16 else ("bf16", "amx_tile")
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", None)
    if is_supported is None:
        return None
    if not is_supported():
        return "rows"
    has_tiles = getattr(torch.cpu, f"_is_{tiles}_supported", None)
    return "AMX" if has_tiles is not None and has_tiles() else "oneDNN"
