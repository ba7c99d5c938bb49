"""Attention on CPUs for models whose query heads share key-value heads: the heads of a group as rows of one product."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FOLDED_SDPA = "lookahead_folded_sdpa"
"""The name under which transformers finds this function."""


def folded_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Torch's `scaled_dot_product_attention` as transformers' own `sdpa` calls it, with another shape of the queries.

    Query heads that share a key-value head become rows of one product, `[batch, key-value heads, group * nodes,
    head size]`, so that no key is repeated. Each row has the sums it had before; what changes is the time: on a
    CPU torch lays out keys and values anew for each head, which in bfloat16 takes far longer than one query does.

    Args:
        module: The layer.
        query: `[batch, heads, nodes, head size]`.
        key: `[batch, key-value heads, keys, head size]`; `value` likewise.
        attention_mask: Added to the scores, `[batch, 1, nodes, keys]`, or `None`: all keys for one node, and
            the keys up to its own place for a run of them.
        dropout: As in transformers.
        scaling: Factor of the scores; 1 / sqrt(head size) if not given.
        **kwargs: What else a model hands to its attention function.

    Returns:
        `[batch, nodes, heads, head size]`, and `None` in place of attention weights.
    """
    batch, heads, nodes, head_size = query.shape
    groups = heads // key.shape[1]
    # In float32 a single row is summed in another order, so one-token steps stay transformers' own there.
    single = nodes == 1 and query.dtype != torch.float32
    masked = nodes > 1 and attention_mask is not None
    foldable = groups > 1 and dropout == 0 and (single or masked) and kwargs.get("position_bias") is None
    if not foldable or (attention_mask is not None and attention_mask.shape[1] != 1):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows = query.reshape(batch, key.shape[1], groups * nodes, head_size)
    if attention_mask is not None:
        attention_mask = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    folded = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return folded.view(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register the function with transformers, under a name that no model uses by default."""
    AttentionInterface.register(FOLDED_SDPA, folded_sdpa)
    AttentionMaskInterface.register(FOLDED_SDPA, sdpa_mask)
