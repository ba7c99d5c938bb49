"""Cache arguments for passes over several rows with separate caches: packed and padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from lookahead.backends.transformers.tree_cache import Row, TreeLayer, write_states

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class RowsCache(Cache):  # type: ignore[misc]
    """Cache argument of a pass over several rows with separate caches.

    Args:
        rows: Rows of the pass.
        counts: Number of nodes of each.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, counts, strict=True))


class PackedCache(RowsCache):
    """Cache argument for packed rows.

    `update` writes the states of each row's nodes to its cache. The attention function finds the states of all rows by
    the returned tensor.

    Attributes:
        written: States of all rows by the `id` of the key tensor that `update` returned, with this tensor.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._counts = list(counts)
        self.written: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer, and return them unchanged."""
        layers = []
        for row, _ in self._rows:
            of_row = row.cache.layers
            layers.append(of_row[layer_idx] if layer_idx < len(of_row) else row.cache.layer(layer_idx))
        if len(layers) == 1:
            states = write_states(layers, [key_states], [value_states])
        else:
            keys = torch.split(key_states, self._counts, 2)
            states = write_states(layers, keys, torch.split(value_states, self._counts, 2))
        self.written[id(key_states)] = (key_states, states)
        return key_states, value_states


class PaddedCache(RowsCache):
    """Cache argument for a padded batch of rows.

    `update` writes the states of each row's nodes to its cache, and returns a padded copy of all rows with nodes after
    the longest text; masks hide the padding.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._longest = max(row.length for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[rows, heads, nodes, head_dim]` of one layer, and return the states of all tokens."""
        padded = self._padded(key_states), self._padded(value_states)
        for place, (row, count) in enumerate(self._rows):
            keys, values = (states.narrow(0, place, 1).narrow(2, 0, count) for states in (key_states, value_states))
            self._fill(padded, place, row.cache.update(keys, values, layer_idx))
        return padded

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the keys `[rows, nodes, size]` of a layer's indexer, and return the keys of all tokens."""
        padded = self._padded(indexer_key_states[:, None])
        for place, (row, count) in enumerate(self._rows):
            keys = row.cache.update_indexer(indexer_key_states[place, None, :count], layer_idx)
            self._fill((padded,), place, (keys[:, None],))
        return padded[:, 0]

    def _padded(self, new: torch.Tensor) -> torch.Tensor:
        """Return new states `[rows, heads, longest text + nodes, head_dim]` with the nodes filled in."""
        padded = new.new_zeros((*new.shape[:2], self._longest + new.shape[2], new.shape[3]))
        padded.narrow(2, self._longest, new.shape[2]).copy_(new)
        return padded

    def _fill(self, padded: Sequence[torch.Tensor], place: int, sources: Sequence[torch.Tensor]) -> None:
        """Copy the states of a row's text."""
        row, _ = self._rows[place]
        if row.length:
            for padded_states, states in zip(padded, sources, strict=True):
                padded_states.narrow(0, place, 1).narrow(2, 0, row.length).copy_(states.narrow(2, 0, row.length))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest text."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and their first index."""
        return self._longest + query_length, 0


@dataclass(frozen=True)
class PackedRows:
    """Rows of a pass for the attention function; models pass it on as the argument `packed_rows`.

    Attributes:
        counts: Number of nodes of each row.
        masks: For each kind of layer the mask added to the scores of each row, `[1, 1, nodes, keys]`, or `None` if
            each node sees all tokens before it. Packed masks in invariant passes.
        kinds: The kind of each layer; a single kind means all layers.
        cache: The cache of the step.
    """

    counts: list[int]
    masks: Mapping[str, Any]
    kinds: Sequence[str]
    cache: PackedCache

    def masks_of(self, module: torch.nn.Module) -> Any:
        """Return the masks of a layer."""
        if len(self.masks) == 1:
            return self.masks[self.kinds[0]]
        layer: Any = module.layer_idx
        return self.masks[self.kinds[layer]]
