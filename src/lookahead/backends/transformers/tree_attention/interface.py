"""Tree attention as transformers calls it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lookahead.backends.transformers.tree_attention.packed_mask import Pages, packed_width
from lookahead.errors import InvalidArgumentError, UnsupportedModelError

NAME = "lookahead_tree"
"""What `attn_implementation` is called, once it is registered."""

BY_POSITION = "lookahead_tree_by_position"
"""The name of the kernel whose bits for a query depend on its own text alone."""

_BEYOND_MASKS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias for each pair of positions",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cache": "a paged cache",
}
"""Arguments of attention functions that change the result and that this one does not know."""


def register() -> None:
    """Make `attn_implementation="lookahead_tree"` known to transformers.

    Passes without a packed mask of ours, such as those of a prompt, run as with "sdpa": transformers builds the masks
    of "sdpa" for them. Registering twice does no harm.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    import lookahead.backends.transformers.tree_attention.kernel  # noqa: F401  (now, and not in the middle of a forward pass)

    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def register_by_position() -> None:
    """Make `attn_implementation="lookahead_tree_by_position"` known to transformers; again does no harm.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    import lookahead.backends.transformers.tree_attention.by_position  # noqa: F401  (as above)

    AttentionInterface.register(BY_POSITION, by_position_forward)
    AttentionMaskInterface.register(BY_POSITION, sdpa_mask)


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    pages: Pages | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that knows packed masks.

    Args:
        module: The layer that calls.
        query: `[batch, heads, nodes, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attention_mask: A packed mask `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32; or, for a pass that is not a
            tree, what "sdpa" takes: no mask, or a dense one.
        scaling: What scores are multiplied by; `head_dim ** -0.5` if not given.
        softcap: Bends scores to stay below this.
        pages: Where the keys of each text lie, of many whose nodes share a batch of 1.
        **kwargs: What else transformers passes. Windows and causality are in the mask; `dropout` must be 0 where that
            is packed.

    Returns:
        `[batch, nodes, heads, value_dim]`, and no weights.

    Raises:
        InvalidArgumentError: The mask is neither packed for these queries nor a dense one, or there is dropout.
        UnsupportedModelError: The model's attention has something that tree attention has not.
    """
    refuse_unknown(module, NAME, kwargs)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if attention_mask is None or attention_mask.dtype == torch.bool or attention_mask.is_floating_point():
        if softcap is None:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            return output, None
        return dense_attention(query, key, value, _visible(query, key, attention_mask), scaling, softcap), None
    _check_packed(query, attention_mask)
    if kwargs.get("dropout"):
        raise InvalidArgumentError(f"dropout={kwargs['dropout']} in a tree attention; put the model into eval mode")

    # Triton is installed where this is registered.
    if torch.compiler.is_compiling():
        from lookahead.backends.transformers.tree_attention.kernel import tree_attention_operator

        compiled: torch.Tensor = tree_attention_operator(query, key, value, attention_mask, scaling, softcap)
        return compiled, None
    from lookahead.backends.transformers.tree_attention.kernel import tree_attention

    return tree_attention(query, key, value, attention_mask, scaling, softcap, pages=pages), None


def by_position_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """As `tree_attention_forward`, for masks along paths, `[batch, 1, nodes, 3 + slots]` int32, and no others; see
    `packed_mask.along_paths`.

    Raises:
        UnsupportedModelError: The layer has something that this attention has not.
    """
    mask = only_packed(module, BY_POSITION, attention_mask, kwargs)
    from lookahead.backends.transformers.tree_attention.by_position import attention_by_position

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_by_position(query, key, value, mask, scaling, softcap), None


def only_packed(
    module: torch.nn.Module, name: str, mask: torch.Tensor | None, kwargs: Mapping[str, object]
) -> torch.Tensor:
    """The mask that `module` hands to attention `name`, which takes packed ones alone.

    Raises:
        UnsupportedModelError: It is another one, or the layer has something that this attention has not.
    """
    refuse_unknown(module, name, kwargs)
    if mask is None or mask.dtype != torch.int32 or kwargs.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand the masks of token trees to its attention, or wants dropout"
        )
    return mask


def refuse_unknown(module: torch.nn.Module, name: str, kwargs: Mapping[str, object]) -> None:
    """Raise an `UnsupportedModelError` if `module` hands something to attention `name` that masks cannot say."""
    for argument, meaning in _BEYOND_MASKS.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedModelError(
                f"the attention of {type(module).__name__} has {meaning} ({argument}), which {name!r} does not have; "
                "load the model with attn_implementation='eager'"
            )


def _visible(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The dense bool mask that "sdpa" would go by."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        # One query sees all; several are the last ones of the text.
        return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if mask.dtype != torch.bool:
        raise InvalidArgumentError(
            f"attention_mask is of {mask.dtype}; with soft-capped scores {NAME!r} takes packed masks and bool masks"
        )
    return mask


def _check_packed(query: torch.Tensor, mask: torch.Tensor) -> None:
    expected = (query.shape[0], 1, query.shape[2], packed_width(query.shape[2]))
    if mask.dtype != torch.int32 or tuple(mask.shape) != expected:
        raise InvalidArgumentError(
            f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype} is not a packed mask of these queries, "
            f"which has the shape {expected} and torch.int32"
        )


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
