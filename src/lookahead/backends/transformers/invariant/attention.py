"""Invariant attention as transformers calls it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lookahead.backends.transformers.tree_attention.interface import only_packed
from lookahead.core.compiled import IS_COMPILED

if IS_COMPILED:
    from lookahead.backends.transformers.invariant.kernel import attend

NAME = "lookahead_invariant"
"""What `attn_implementation` is called, once it is registered."""

PACKED_ROWS = "lookahead_packed_rows_invariant"
"""The name of it over texts that lie one after another; see `packed_rows_attention`, which registers it."""

LEAST_NODES = "least_nodes"
"""The attribute of a model that says how many nodes a pass has at least, where products of a lone row would have to be
padded one by one. Two cost no more there, and with packed weights four take less time than one."""

_KINDS = {torch.bfloat16: np.int16(0), torch.float16: np.uint16(0), torch.float32: np.float32(0)}
"""What tells the kernel of what type numbers are; see `machine.read`."""

_LEAST_WORK = 1 << 17
"""Products of query, key and head for which another thread pays."""


def register() -> None:
    """Make `attn_implementation="lookahead_invariant"` known to transformers; again does no harm."""
    AttentionInterface.register(NAME, invariant_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    mask = only_packed(module, NAME, attention_mask, kwargs)
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
