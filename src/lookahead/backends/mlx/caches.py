"""Caches of mlx-lm in passes over trees and chains.

A tree runs as a batch: each node is a row with one token. `TreePass` gives every layer the position of each row, a mask
of the visible tokens, and the same keys and values for all rows. Keys and values of the nodes go behind the text, into
the `KVCache` of mlx-lm. A model reads a chain as it reads a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from lookahead.core.forest import Layout

Caches = list[Any]
"""The cache of each layer, as `mlx_lm.models.cache.make_prompt_cache` makes them."""


def are_plain(caches: Caches) -> bool:
    """Return whether every layer keeps the keys and values of all tokens, so that trees can run."""
    return all(type(cache) is KVCache for cache in caches)


def cached_tokens(caches: Caches) -> int:
    """Return the number of tokens in the caches of a text."""
    parts = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]
    return max((int(part.offset) for part in parts if hasattr(part, "offset")), default=0)


def longest_chain(caches: Caches) -> int | None:
    """Return the longest text that a pass over several tokens reads as single tokens do; `None` without a limit.

    With `max_kv_size`, mlx-lm keeps the first tokens of a text and the last ones. The masks of its passes over several
    tokens hide the first ones.
    """
    sizes = [cache.max_size for cache in caches if isinstance(cache, RotatingKVCache) and cache.keep]
    return min(sizes, default=None)


class TreePass:
    """Positions and masks of a pass over the nodes of a tree.

    Args:
        length: Number of cached tokens before the tree.
        layout: Nodes of the tree in the order of the pass.
        grouped: Whether masks that a model asks for as arrays have an axis more, for scores by groups of heads.
    """

    def __init__(self, length: int, layout: Layout, grouped: bool = False) -> None:
        self._grouped = grouped
        depths = layout.depths
        self._positions = length + depths
        self._key_positions = np.concatenate([np.arange(length), self._positions])
        seen = np.ones((len(depths), length + len(depths)), dtype=np.bool_)
        seen[:, length:] = layout.ancestor_mask()
        self._seen = seen
        self._masks: dict[tuple[int | None, bool], Any] = {}
        self.offset = mx.array(self._positions.astype(np.int32))

    def caches(self, caches: Caches) -> list[_LayerCache]:
        """Return the caches of all layers for this pass."""
        return [_LayerCache(cache, self) for cache in caches]

    def mask(self, window: int | None, as_array: bool) -> Any:
        """Return the tokens that each node sees in a layer, `[nodes, 1, 1, tokens + nodes]` bool.

        Args:
            window: Number of tokens that the layer sees; all of them if `None`.
            as_array: Whether the model asks for an array also where a name would do.
        """
        key = window, as_array and self._grouped
        if key not in self._masks:
            seen = self._seen
            if window is not None:
                seen = seen & (self._positions[:, None] < self._key_positions[None] + window)
            self._masks[key] = mx.array(seen)[:, None, None, None] if key[1] else mx.array(seen)[:, None, None]
        return self._masks[key]


class _LayerCache:
    """Cache of one layer in a `TreePass`, with the members that mlx-lm's models use."""

    def __init__(self, cache: Any, tree: TreePass) -> None:
        self._cache = cache
        self._tree = tree
        self.offset = tree.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask of the nodes; mlx-lm passes arguments by these names."""
        return self._tree.mask(window_size, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append the nodes `[nodes, heads, 1, size]` to the text; return a view of all tokens for each node."""
        nodes = keys.shape[0]
        states = self._cache.update_and_fetch(keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3))
        wide = [mx.broadcast_to(part, (nodes, *part.shape[1:])) for part in states]
        return wide[0], wide[1]


def keep_nodes(caches: Caches, length: int, slots: Sequence[int]) -> None:
    """Keep some nodes of a tree behind the first `length` tokens, ascending, and forget the others."""
    moved = next((place for place, slot in enumerate(slots) if place != slot), len(slots))
    target = slice(length + moved, length + len(slots))
    for cache in caches:
        if moved < len(slots):
            source = mx.array([length + slot for slot in slots[moved:]])
            cache.keys[..., target, :] = cache.keys[..., source, :]
            cache.values[..., target, :] = cache.values[..., source, :]
        cache.offset = length + len(slots)


def first_tokens(caches: Caches, tokens: int) -> Caches:
    """Return caches of the first `tokens` tokens of a text, which share its memory until one of them grows."""
    copies = []
    for cache in caches:
        copy = KVCache()
        copy.keys, copy.values = cache.keys[..., :tokens, :], cache.values[..., :tokens, :]
        copy.offset = tokens
        copies.append(copy)
    return copies


def restorer(caches: Caches) -> Callable[[], None]:
    """Return a function that restores the present state of the caches, once."""
    parts = [_restorer(cache) for cache in caches]

    def restore() -> None:
        for part in parts:
            part()

    return restore


def _restorer(cache: Any) -> Callable[[], None]:
    if isinstance(cache, CacheList):
        return restorer(list(cache.caches))
    if type(cache) in (KVCache, QuantizedKVCache):  # later tokens are overwritten
        return _assignment(cache, "offset", cache.offset)
    # A write into a cache changes its array object. Another object of the same array keeps the values.
    state = tree_map(lambda leaf: mx.array(leaf) if isinstance(leaf, mx.array) else leaf, cache.state)
    return _assignment(cache, "state", state)


def _assignment(target: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(target, name, value)
