"""Attention functions of clones: folded heads, invariant, packed rows, and trees.

All have transformers' signature: the calling layer, `query` `[batch, heads, nodes, size]`, `key` `[batch, kv heads,
keys, size]`, `value` `[batch, kv heads, keys, value size]`, a mask, and named arguments: `scaling` of the scores (1 /
sqrt(size) by default), `softcap` (soft limit of scores), `dropout`. They return `[batch, nodes, heads, value size]`,
and `None` in place of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lookahead.backends.transformers.invariant.kernel import attend
from lookahead.backends.transformers.rows import PackedRows
from lookahead.backends.transformers.tree_attention import Pages
from lookahead.errors import InvalidArgumentError, UnsupportedModelError

FOLDED_SDPA = "lookahead_folded_sdpa"
"""Registered name of `folded_sdpa`."""

PACKED_ROWS = "lookahead_packed_rows"
"""Registered name of `packed_rows_attention`."""

TREE_ATTENTION = "lookahead_tree"
"""Registered name of `tree_attention_forward`. Passes without our packed mask, as of a prompt, use "sdpa"."""

BY_POSITION = "lookahead_tree_by_position"
"""Registered name of `by_position_forward`, with bits that depend only on a query's own text."""

_BEYOND_MASKS = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias for each pair of positions",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cache": "a paged cache",
}
"""Arguments of attention functions that change the result and are not supported here."""

INVARIANT = "lookahead_invariant"
"""Registered name of `invariant_attention`."""

INVARIANT_ROWS = "lookahead_packed_rows_invariant"
"""Registered name of `packed_rows_attention` with `invariant_attention` for each row."""

MIN_NODES = "min_nodes"
"""Attribute of a clone: smallest number of nodes of a pass. Invariant products of one row would need padding each."""

_WORK_PER_THREAD = 1 << 17
"""Products of query, key and head that occupy one thread."""


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
    """Torch's `scaled_dot_product_attention` with folded queries, for models on CPUs with shared key-value heads.

    Query heads of a key-value head become rows of one product, `[batch, key-value heads, group * nodes, head size]`, so
    that keys are not repeated. The sums stay the same, but not the time: torch on a CPU repacks keys and values for
    each head, which is slow in bfloat16.

    The mask `[batch, 1, nodes, keys]` is added to the scores; without one, attention is causal.
    """
    return _fold(module, [query], [(key, value)], [attention_mask], dropout, scaling, **kwargs)[0], None


def _fold(
    module: torch.nn.Module,
    queries: Sequence[torch.Tensor],
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    masks: Sequence[torch.Tensor | None],
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """Return `folded_sdpa` of several queries, each with its own keys, values and mask."""
    outputs = []
    for query, (key, value), mask in zip(queries, states, masks, strict=True):
        batch, heads, nodes, head_size = query.shape
        groups = heads // key.shape[1]
        # In float32 the sum of a single row has another order, so plain steps use transformers' own function.
        single = nodes == 1 and query.dtype != torch.float32
        masked = nodes > 1 and mask is not None
        foldable = groups > 1 and dropout == 0 and (single or masked) and kwargs.get("position_bias") is None
        if not foldable or (mask is not None and mask.shape[1] != 1):
            unfolded = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
            outputs.append(unfolded[0])
            continue
        rows = query.reshape(batch, key.shape[1], groups * nodes, head_size)
        if mask is not None:
            mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
        folded = torch.nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
        outputs.append(folded.view(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous())
    return outputs


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
    """Attention on the CPU with bits that depend only on visible tokens, in the order of the text.

    Sums are in float32, and rounded once at the end. The mask is packed (`tree_attention`) with windows and
    causality; there is no dropout.

    Raises:
        UnsupportedModelError: The layer has an unsupported argument.
    """
    mask = only_packed(module, INVARIANT, attention_mask, kwargs)
    batch, heads, nodes, size = query.shape
    _, shared, keys, width = value.shape
    group = heads // shared
    rows = query.reshape(batch, shared, group, nodes, size).transpose(2, 3)
    output = torch.empty(batch, shared, nodes, group, width, dtype=torch.float32, device=query.device)
    arrays = tuple(states.float().contiguous().view(-1).numpy() for states in (rows, key, value, output))
    sizes = (shared, group, nodes, keys, size, width)
    numbers = (np.float32(size**-0.5 if scaling is None else scaling), np.float32(softcap or 0.0))
    about = (arrays, sizes, np.ascontiguousarray(mask[:, 0].numpy()), numbers)
    units = batch * shared
    threads = min(torch.get_num_threads(), units, batch * heads * nodes * keys // _WORK_PER_THREAD + 1)
    run = partial(attend, *about)
    if threads == 1:
        run((0, units))
    else:
        bounds = [units * part // threads for part in range(threads + 1)]
        list(_pool(threads).map(run, pairwise(bounds)))
    return output.transpose(1, 2).flatten(2, 3).to(query.dtype), None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lookahead-attention")


def packed_rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over packed texts in one row of tokens: each text sees only its own keys and values.

    `packed_rows` has the masks of the step. Keys and values come from the cache of the step.

    Raises:
        UnsupportedModelError: The model did not pass `packed_rows` on, or uses other keys than its cache returned.
    """
    cache = None if packed_rows is None else packed_rows.cache
    _, states = (None, None) if cache is None else cache.written.get(id(key), (None, None))
    if packed_rows is None or not states or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to other keys than its cache returned, or has its own mask"
        )
    masks = packed_rows.masks_of(module)
    queries = torch.split(query, packed_rows.counts, 2) if len(packed_rows.counts) > 1 else [query]
    if module.config._attn_implementation == INVARIANT_ROWS:  # type: ignore[union-attr]
        of_row: Any = invariant_attention
    elif query.device.type == "cpu":  # folding is faster only there
        outputs = _fold(module, queries, states, masks, **kwargs)
        return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), None
    else:
        of_row = sdpa_attention_forward
    rows = zip(queries, states, masks, strict=True)
    outputs = [of_row(module, nodes, keys, values, mask, **kwargs)[0] for nodes, (keys, values), mask in rows]
    return torch.cat(outputs, dim=1), None


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    pages: Pages | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention on a GPU with packed masks, including windows and causality; in place of "sdpa".

    The mask is packed, `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32; other masks are passed on to "sdpa". `pages`
    locate the keys of each text, if several texts share a batch of 1.

    Raises:
        InvalidArgumentError: There is dropout.
        UnsupportedModelError: The layer has an unsupported argument.
    """
    refuse_unknown(module, TREE_ATTENTION, kwargs)
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    if kwargs.get("dropout"):
        raise InvalidArgumentError(f"dropout={kwargs['dropout']} in tree attention; call model.eval()")
    from lookahead.backends.transformers.tree_attention import kernel

    return kernel.tree_attention(query, key, value, attention_mask, scaling, pages=pages), None


def by_position_forward(
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
    """Tree attention with masks along paths, `[batch, 1, nodes, 3 + slots]` int32; see `tree_attention.along_paths`.

    Raises:
        UnsupportedModelError: The mask is another one, or the layer has an unsupported argument.
    """
    mask = only_packed(module, BY_POSITION, attention_mask, kwargs)
    from lookahead.backends.transformers.tree_attention.kernel import attention_by_position

    return attention_by_position(query, key, value, mask, scaling, softcap, pages), None


def only_packed(
    module: torch.nn.Module, name: str, mask: torch.Tensor | None, kwargs: Mapping[str, object]
) -> torch.Tensor:
    """Return the packed mask of `module` for attention `name`.

    Raises:
        UnsupportedModelError: The mask is another one, or the layer has an unsupported argument.
    """
    refuse_unknown(module, name, kwargs)
    if mask is None or mask.dtype != torch.int32 or kwargs.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass the masks of token trees to its attention, or has dropout"
        )
    return mask


def refuse_unknown(module: torch.nn.Module, name: str, kwargs: Mapping[str, object]) -> None:
    """Raise `UnsupportedModelError` if `module` passes an unsupported argument to attention `name`."""
    for argument, meaning in _BEYOND_MASKS.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedModelError(
                f"the attention of {type(module).__name__} has {meaning} ({argument}), unsupported by {name!r}; "
                "load the model with attn_implementation='eager'"
            )


for _name, _function, _makes_masks in (
    (FOLDED_SDPA, folded_sdpa, True),
    (INVARIANT, invariant_attention, True),
    (PACKED_ROWS, packed_rows_attention, False),
    (INVARIANT_ROWS, packed_rows_attention, False),
    (TREE_ATTENTION, tree_attention_forward, True),
    (BY_POSITION, by_position_forward, True),
):
    AttentionInterface.register(_name, _function)
    if _makes_masks:  # transformers makes masks if we do not
        AttentionMaskInterface.register(_name, sdpa_mask)
