"""Caches of mlx-lm in passes over trees and chains.

Trees run as a batch: each node is a row with one token. `TreePass` gives every layer the position of each row, a mask
of the visible tokens, and the keys and values of its text. Keys and values of the nodes go behind the text, into the
`KVCache` of mlx-lm. A model reads a chain as it reads a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from lookahead.core.forest import Layout

Caches = list[Any]
"""The cache of each layer, as `mlx_lm.models.cache.make_prompt_cache` makes them."""


def are_plain(caches: Caches) -> bool:
    """Return whether every layer keeps the keys and values of all tokens, so that trees can run."""
    return all(type(cache) is KVCache for cache in caches)


def _parts(caches: Caches) -> list[Any]:
    """Return all caches, those of a layer with several ones too."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]


def cached_tokens(caches: Caches) -> int:
    """Return the number of tokens in the caches of a text."""
    return max((int(part.offset) for part in _parts(caches) if hasattr(part, "offset")), default=0)


def longest_chain(caches: Caches) -> int | None:
    """Return the longest text that a pass over several tokens reads as single tokens do; `None` without a limit.

    With `max_kv_size`, mlx-lm keeps the first tokens of a text and the last ones. The masks of its passes over several
    tokens hide the first ones.
    """
    sizes = [cache.max_size for cache in caches if isinstance(cache, RotatingKVCache) and cache.keep]
    return min(sizes, default=None)


class TreePass:
    """Positions and masks of a pass over the nodes of some trees, one for each text.

    Args:
        texts: Caches of each text.
        layouts: Nodes of each tree in the order of the pass.
        grouped: Whether masks that a model asks for as arrays have an axis more, for scores by groups of heads.

    Attributes:
        tokens: Token ids of the nodes, `[nodes, 1]`.
        caches: Caches of all layers for this pass.
    """

    def __init__(self, texts: Sequence[Caches], layouts: Sequence[Layout], grouped: bool = False) -> None:
        self._grouped = grouped
        lengths = [cached_tokens(caches) for caches in texts]
        bounds = [*pairwise(accumulate((len(layout.order) for layout in layouts), initial=0))]
        self._width = max(length + end - begin for length, (begin, end) in zip(lengths, bounds, strict=True))
        # Of nodes and of the keys that they may see; keys behind a text are seen by none.
        self._positions = np.empty(bounds[-1][1], dtype=np.int64)
        self._key_positions = np.zeros((bounds[-1][1], self._width), dtype=np.int64)
        self._seen = np.zeros((bounds[-1][1], self._width), dtype=np.bool_)
        for length, layout, (begin, end) in zip(lengths, layouts, bounds, strict=True):
            nodes, tree = slice(begin, end), slice(length, length + end - begin)
            self._positions[nodes] = length + layout.depths
            self._key_positions[nodes, :length] = np.arange(length)
            self._key_positions[nodes, tree] = self._positions[nodes]
            self._seen[nodes, :length] = True
            self._seen[nodes, tree] = layout.ancestor_mask()
        self._masks: dict[tuple[int | None, bool], Any] = {}
        self.tokens = mx.array(np.concatenate([layout.tokens for layout in layouts]).astype(np.int32))[:, None]
        self.offset = mx.array(self._positions.astype(np.int32))
        self._bounds = bounds
        self.caches = [_LayerCache(layer, self) for layer in zip(*texts, strict=True)]

    def mask(self, window: int | None, as_array: bool) -> Any:
        """Return the tokens that each node sees in a layer, `[nodes, 1, 1, width]` bool.

        Args:
            window: Number of tokens that the layer sees; all of them if `None`.
            as_array: Whether the model asks for an array also where a name would do.
        """
        key = window, as_array and self._grouped
        if key not in self._masks:
            seen = self._seen
            if window is not None:
                seen = seen & (self._positions[:, None] < self._key_positions + window)
            self._masks[key] = mx.array(seen)[:, None, None, None] if key[1] else mx.array(seen)[:, None, None]
        return self._masks[key]

    def append(self, layer: Sequence[Any], states: tuple[Any, Any]) -> list[Any]:
        """Append keys and values of the nodes `[nodes, heads, 1, size]` to their texts; return those of each node."""
        wide: tuple[list[Any], list[Any]] = [], []
        for cache, (begin, end) in zip(layer, self._bounds, strict=True):
            parts = cache.update_and_fetch(*(part[begin:end].transpose(2, 1, 0, 3) for part in states))
            for part, rows in zip(parts, wide, strict=True):
                if part.shape[2] < self._width:
                    part = mx.pad(part, [(0, 0), (0, 0), (0, self._width - part.shape[2]), (0, 0)])
                rows.append(mx.broadcast_to(part, (end - begin, *part.shape[1:])))
        return [rows[0] if len(rows) == 1 else mx.concatenate(rows) for rows in wide]


class _LayerCache:
    """Cache of one layer in a `TreePass`, with the members that mlx-lm's models use."""

    def __init__(self, layer: Sequence[Any], trees: TreePass) -> None:
        self._layer = layer
        self._trees = trees
        self.offset = trees.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask of the nodes; mlx-lm passes arguments by these names."""
        return self._trees.mask(window_size, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> list[Any]:
        """Append the nodes to their texts; return all tokens of each node's text."""
        return self._trees.append(self._layer, (keys, values))


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
    parts = [(cache.keys[..., :tokens, :], cache.values[..., :tokens, :], tokens) for cache in caches]
    return [KVCache.from_state(part) for part in parts]


def restorer(caches: Caches) -> Callable[[], None]:
    """Return a function that restores the present state of the caches, once."""
    states: list[tuple[Any, str, Any]] = []
    for part in _parts(caches):
        if type(part) is KVCache:  # later tokens are overwritten
            states.append((part, "offset", part.offset))
        else:  # a write into a cache changes its array object; another object of the same array keeps the values
            copy = tree_map(lambda leaf: mx.array(leaf) if isinstance(leaf, mx.array) else leaf, part.state)
            states.append((part, "state", copy))

    def restore() -> None:
        for part, name, value in states:
            setattr(part, name, value)

    return restore
