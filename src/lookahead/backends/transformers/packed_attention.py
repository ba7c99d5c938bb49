"""Attention over texts that lie one after another in one row of tokens: each sees its own keys and values alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.backends.transformers.folded_attention import folded_sdpa
from lookahead.backends.transformers.invariant.attention import PACKED_ROWS as INVARIANT
from lookahead.backends.transformers.invariant.attention import invariant_attention
from lookahead.backends.transformers.layouts import PackedStep
from lookahead.errors import UnsupportedModelError

NAME = "lookahead_packed_rows"
"""The name under which transformers finds this function."""


def packed_rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_rows: PackedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Torch's `scaled_dot_product_attention`, row by row.

    Args:
        module: The layer.
        query: `[1, heads, nodes of all rows, head size]`.
        key: What `PackedCache.update` returned; `value` likewise.
        attention_mask: None: which node sees what is told by `packed_rows`.
        dropout: As in transformers.
        scaling: Factor of the scores; 1 / sqrt(head size) if not given.
        packed_rows: The step.
        **kwargs: What else a model hands to its attention function.

    Returns:
        `[1, nodes of all rows, heads, head size]`, and `None` in place of attention weights.

    Raises:
        UnsupportedModelError: The model did not hand the step through, or computes attention over other keys than
            those that its cache gave it.
    """
    states = None if packed_rows is None else packed_rows.cache.states(key)
    if packed_rows is None or states is None or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to other keys than those of its cache, or by a mask of its own"
        )
    # Folding is for CPUs.
    attend: Any = folded_sdpa if query.device.type == "cpu" else sdpa_attention_forward
    if module.config._attn_implementation == INVARIANT:  # type: ignore[union-attr]
        attend = invariant_attention
    masks = packed_rows.masks_of(module)
    if len(states) == 1:
        attended: torch.Tensor = attend(
            module, query, *states[0], masks[0], dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return attended, None
    outputs = []
    for (start, end), (keys, values), mask in zip(packed_rows.bounds, states, masks, strict=True):
        nodes = query.narrow(2, start, end - start)
        outputs.append(attend(module, nodes, keys, values, mask, dropout=dropout, scaling=scaling, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def register() -> None:
    """Register the function with transformers, under a name that no model uses by default.

    With no function for masks beside it: transformers then makes none.
    """
    AttentionInterface.register(NAME, packed_rows_attention)
    AttentionInterface.register(INVARIANT, packed_rows_attention)
