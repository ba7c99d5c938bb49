"""Tree attention in plain torch: what the kernel must compute, written so that it is easy to believe."""

from __future__ import annotations

import torch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention with a dense mask, computed in float32.

    Args:
        query: `[batch, heads, nodes, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`; as many query heads as `heads / kv_heads` share a head of keys.
        value: `[batch, kv_heads, keys, value_dim]`.
        visible: Which keys each query may see, `[batch, 1, nodes, keys]` bool; at least one for each query.
        scaling: What scores are multiplied by.
        softcap: Scores are bent to stay below this: `softcap * tanh(score / softcap)`.

    Returns:
        `[batch, nodes, heads, value_dim]` in the number type of `query`.
    """
    group = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(group, dim=1)
    # A hidden value may be garbage, and 0 * NaN is NaN.
    used = visible.any(dim=2)[..., None]  # [batch, 1, keys, 1]
    values = value.float().masked_fill(~used, 0.0).repeat_interleave(group, dim=1)
    scores = query.float() @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(1, 2).contiguous().to(query.dtype)
