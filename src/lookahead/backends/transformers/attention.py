"""Attention as the clones of a model call it: heads folded into rows, invariant, rows packed into one, and trees.

All are attention functions of transformers. They take the layer that calls, `query` `[batch, heads, nodes, size]`,
`key` `[batch, heads of keys, keys, size]`, `value` `[batch, heads of keys, keys, value size]`, a mask, and by name what
else a model hands over: `scaling`, what scores are multiplied by, 1 / sqrt(size) if not given; `softcap`, which bends
scores to stay below it; `dropout`. They give `[batch, nodes, heads, value size]`, and `None` in place of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from lookahead.backends.transformers.rows import PackedRows, StaticTreeCache
from lookahead.backends.transformers.tree_attention.packed_mask import Pages
from lookahead.errors import InvalidArgumentError, UnsupportedModelError

FOLDED_SDPA = "lookahead_folded_sdpa"
"""The name under which transformers finds `folded_sdpa`."""

PACKED_ROWS = "lookahead_packed_rows"
"""The name under which it finds `packed_rows_attention`."""

TREE_ATTENTION = "lookahead_tree"
"""The name of `tree_attention_forward`. Passes without a packed mask of ours, such as those of a prompt, run as with
"sdpa"."""

BY_POSITION = "lookahead_tree_by_position"
"""That of `by_position_forward`, whose bits for a query depend on its own text alone."""

_BEYOND_MASKS = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias for each pair of positions",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cache": "a paged cache",
}
"""Arguments of attention functions that change the result and that this one does not know."""

INVARIANT = "lookahead_invariant"
"""The name under which it finds `invariant_attention`."""

INVARIANT_ROWS = "lookahead_packed_rows_invariant"
"""The name under which it finds `packed_rows_attention` with that for each row."""

LEAST_NODES = "least_nodes"
"""The attribute of a model that says how many nodes a pass has at least, where products of a lone row would have to be
padded one by one. Two cost no more there, and with packed weights four take less time than one."""

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

    The mask is added to the scores, `[batch, 1, nodes, keys]`; without one, one node sees all keys, and a run of them
    each those up to its own place.
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
    """Attention on the CPU whose result for a query depends on what it sees alone, in the order of the text.

    All is summed in float32 and rounded once, at the end. The mask is packed, see `tree_attention.packed_mask`; windows
    and causality are in it, and there is no dropout.

    Raises:
        UnsupportedModelError: The layer has something that this attention has not.
    """
    mask = only_packed(module, INVARIANT, attention_mask, kwargs)
    batch, heads, nodes, size = query.shape
    _, shared, keys, width = value.shape
    group = heads // shared
    rows = query.reshape(batch, shared, group, nodes, size).transpose(2, 3)
    output = torch.empty(batch, shared, nodes, group, width)
    arrays = tuple(states.float().contiguous().view(-1).numpy() for states in (rows, key, value, output))
    sizes = (shared, group, nodes, keys, size, width)
    numbers = (np.float32(size**-0.5 if scaling is None else scaling), np.float32(softcap or 0.0))
    about = (arrays, sizes, np.ascontiguousarray(mask[:, 0].numpy()), numbers)
    units = batch * shared
    threads = min(torch.get_num_threads(), units, batch * heads * nodes * keys // _LEAST_WORK + 1)
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
    """Attention over texts that lie one after another in one row of tokens: each sees its own keys and values alone.

    Which node sees what is told by `packed_rows`, the step, and by no mask. Keys and values are what the cache of the
    step returned.

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
    outputs = []
    for (start, end), (keys, values), mask in zip(packed_rows.bounds, states, masks, strict=True):
        nodes = query.narrow(2, start, end - start)
        outputs.append(of_row(module, nodes, keys, values, mask, **kwargs)[0])
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
    """Attention on a GPU that knows packed masks, which have windows and causality in them; in place of "sdpa".

    The mask is packed, `[batch, 1, nodes, 3 + ceil(nodes / 32)]` int32; or, for a pass that is not a tree, what "sdpa"
    takes. `pages` say where the keys of each text lie, of many whose nodes share a batch of 1.

    Raises:
        InvalidArgumentError: There is dropout.
        UnsupportedModelError: The model's attention has something that tree attention has not.
    """
    refuse_unknown(module, TREE_ATTENTION, kwargs)
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    if kwargs.get("dropout"):
        raise InvalidArgumentError(f"dropout={kwargs['dropout']} in a tree attention; put the model into eval mode")
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
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """As `tree_attention_forward`, for masks along paths, `[batch, 1, nodes, 3 + slots]` int32, and no others; see
    `packed_mask.along_paths`.

    Raises:
        UnsupportedModelError: The layer has something that this attention has not.
    """
    mask = only_packed(module, BY_POSITION, attention_mask, kwargs)
    from lookahead.backends.transformers.tree_attention.kernel import attention_by_position

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


for _name, _function, _makes_masks in (
    (FOLDED_SDPA, folded_sdpa, True),
    (INVARIANT, invariant_attention, True),
    (PACKED_ROWS, packed_rows_attention, False),
    (INVARIANT_ROWS, packed_rows_attention, False),
    (TREE_ATTENTION, tree_attention_forward, True),
    (BY_POSITION, by_position_forward, True),
):
    AttentionInterface.register(_name, _function)
    if _makes_masks:  # where we make none
        AttentionMaskInterface.register(_name, sdpa_mask)
