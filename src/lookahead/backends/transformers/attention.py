"""Attention as the clones of a model call it: heads folded into rows, invariant, and rows packed into one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lookahead.backends.transformers.static_cache import StaticTreeCache
from lookahead.backends.transformers.tree_attention.interface import only_packed, tree_attention_forward
from lookahead.core.compiled import IS_COMPILED
from lookahead.errors import UnsupportedModelError

if TYPE_CHECKING:
    from lookahead.backends.transformers.layouts import PackedStep

if IS_COMPILED:
    from lookahead.backends.transformers.invariant.kernel import attend

FOLDED_SDPA = "lookahead_folded_sdpa"
"""The name under which transformers finds `folded_sdpa`."""

PACKED_ROWS = "lookahead_packed_rows"
"""The name under which it finds `packed_rows_attention`."""

INVARIANT = "lookahead_invariant"
"""The name under which it finds `invariant_attention`."""

INVARIANT_ROWS = "lookahead_packed_rows_invariant"
"""The name under which it finds `packed_rows_attention` with that for each row."""

LEAST_NODES = "least_nodes"
"""The attribute of a model that says how many nodes a pass has at least, where products of a lone row would have to be
padded one by one. Two cost no more there, and with packed weights four take less time than one."""

_KINDS = {torch.bfloat16: np.int16(0), torch.float16: np.uint16(0), torch.float32: np.float32(0)}
"""What tells the kernel of what type numbers are; see `machine.read`."""

_LEAST_WORK = 1 << 17
"""Products of query, key and head for which another thread pays."""


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
    """Torch's `scaled_dot_product_attention` as transformers' own `sdpa` calls it, with another shape of the queries:
    for models on CPUs whose query heads share key-value heads.

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


def invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers whose result for a query depends on what it sees, in the order of the text.

    All is summed in float32 and rounded once, at the end.

    Args:
        module: The layer that calls.
        query: `[batch, heads, nodes, size]`, of 16 bits or float32, like keys and values, on the CPU.
        key: `[batch, heads of keys, keys, size]`.
        value: `[batch, heads of keys, keys, value size]`.
        attention_mask: A packed mask, see `tree_attention.packed_mask`.
        scaling: What scores are multiplied by; 1 / sqrt(size) if not given.
        softcap: Bends scores to stay below this.
        **kwargs: What else transformers passes. Windows and causality are in the mask; `dropout` must be 0.

    Returns:
        `[batch, nodes, heads, value size]`, and no weights.

    Raises:
        UnsupportedModelError: The layer has something that this attention has not.
    """
    mask = only_packed(module, INVARIANT, attention_mask, kwargs)
    query, key, value = (states if states.stride(3) == 1 else states.contiguous() for states in (query, key, value))
    batch, heads, nodes, size = query.shape
    _, shared, keys, value_size = value.shape
    output = torch.empty((batch, nodes, heads, value_size))
    about = (
        (query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()),
        (_KINDS[query.dtype], _KINDS[key.dtype], _KINDS[value.dtype]),
        (query.stride(), key.stride(), value.stride()),
        (heads, shared, nodes, keys, size, value_size),
        mask.numpy(),
        (np.float32(size**-0.5 if scaling is None else scaling), np.float32(softcap or 0.0)),
    )
    units = batch * shared
    threads = min(torch.get_num_threads(), units, batch * heads * nodes * keys // _LEAST_WORK + 1)
    if threads == 1:
        attend(*about, (0, units))
    else:
        bounds = [units * part // threads for part in range(threads + 1)]
        for part in [_pool(threads).submit(attend, *about, part_bounds) for part_bounds in pairwise(bounds)]:
            part.result()
    return output.to(query.dtype), None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lookahead-attention")


def packed_rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over texts that lie one after another in one row of tokens: each sees its own keys and values alone.

    Args:
        module: The layer.
        query: `[1, heads, nodes of all rows, head size]`.
        key: What the cache of the step returned; `value` likewise.
        attention_mask: None: which node sees what is told by `packed_rows`.
        packed_rows: The step.
        **kwargs: What else a model hands to its attention function, as for that which each row is attended to by.

    Returns:
        `[1, nodes of all rows, heads, head size]`, and `None` in place of attention weights.

    Raises:
        UnsupportedModelError: The model did not hand the step through, or computes attention over other keys than
            those that its cache gave it.
    """
    cache = None if packed_rows is None else packed_rows.cache
    if isinstance(cache, StaticTreeCache):
        states: Any = [layer for layer in cache.layers if layer.keys is key]
    else:
        states = None if cache is None else cache.states(key)
    if packed_rows is None or not states or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to other keys than those of its cache, or by a mask of its own"
        )
    masks = packed_rows.masks_of(module)
    if packed_rows.pages is not None:
        return tree_attention_forward(module, query, key, value, masks, pages=packed_rows.pages, **kwargs)
    # Folding is for CPUs.
    of_row: Any = folded_sdpa if query.device.type == "cpu" else sdpa_attention_forward
    if module.config._attn_implementation == INVARIANT_ROWS:  # type: ignore[union-attr]
        of_row = invariant_attention
    if len(states) == 1:
        attended: torch.Tensor = of_row(module, query, *states[0], masks[0], **kwargs)[0]
        return attended, None
    outputs = []
    for (start, end), (keys, values), mask in zip(packed_rows.bounds, states, masks, strict=True):
        nodes = query.narrow(2, start, end - start)
        outputs.append(of_row(module, nodes, keys, values, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def register() -> None:
    """Register the functions with transformers, under names that no model uses by default.

    With no function for the masks of packed rows: transformers then makes none.
    """
    AttentionInterface.register(FOLDED_SDPA, folded_sdpa)
    AttentionMaskInterface.register(FOLDED_SDPA, sdpa_mask)
    AttentionInterface.register(PACKED_ROWS, packed_rows_attention)
    AttentionInterface.register(INVARIANT, invariant_attention)
    AttentionMaskInterface.register(INVARIANT, sdpa_mask)
    AttentionInterface.register(INVARIANT_ROWS, packed_rows_attention)
