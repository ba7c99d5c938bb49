"""The kernel as an operator of torch: `torch.compile` does not look inside, and knows the shape of what comes out."""

from __future__ import annotations

import torch

from lookahead.backends.transformers.tree_attention.kernel import tree_attention


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, nodes, _size = query.shape
    return query.new_empty((batch, nodes, heads, value.shape[3]))


tree_attention_operator = torch.library.custom_op(
    "lookahead::tree_attention",
    tree_attention,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor packed_mask, float scaling, float? softcap) -> Tensor",
)
"""As `tree_attention`, with the tiling chosen by it."""
tree_attention_operator.register_fake(_shape)
