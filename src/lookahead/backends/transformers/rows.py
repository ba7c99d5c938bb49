"""Cache arguments for passes over several rows with separate caches: packed and padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from lookahead.backends.transformers.tree_cache import Row, TreeLayer

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class RowsCache(Cache):  # type: ignore[misc]
    """Cache argument of a pass over several rows.

    Args:
        rows: Rows of the pass.
        counts: Number of nodes of each.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._texts = [row.cache for row in rows]
        self._counts = list(counts)

    def _layers(self, index: int) -> list[TreeLayer]:
        """Return a layer of each row."""
        return [text.layers[index] if index < len(text.layers) else text.layer(index) for text in self._texts]


class PackedCache(RowsCache):
    """Cache argument for packed rows.

    `update` writes the states of each row's nodes to its cache. The attention function finds the states of all rows by
    the returned tensor.

    Attributes:
        written: States of all rows by the `id` of the key tensor that `update` returned, with this tensor.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self.written: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer, and return them unchanged."""
        layers = self._layers(layer_idx)
        if len(layers) == 1:
            states = [layers[0].update(key_states, value_states)]
        else:
            new = torch.split(key_states, self._counts, 2), torch.split(value_states, self._counts, 2)
            states = [layer.update(*of_row) for layer, *of_row in zip(layers, *new, strict=True)]
        self.written[id(key_states)] = (key_states, states)
        return key_states, value_states


class PaddedCache(RowsCache):
    """Cache argument for a padded batch of rows.

    `update` writes the states of each row's nodes to its cache, and returns a padded copy of all rows with nodes after
    the longest text; masks hide the padding.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._longest = max(text.length for text in self._texts)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[rows, heads, nodes, head_dim]` of one layer, and return the states of all tokens."""
        layers = self._layers(layer_idx)
        new = zip(layers, self._split(key_states), self._split(value_states), strict=True)
        keys, values = zip(*[layer.update(*of_row) for layer, *of_row in new], strict=True)
        return self._padded(key_states, keys), self._padded(value_states, values)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the keys `[rows, nodes, size]` of a layer's indexer, and return the keys of all tokens."""
        new = indexer_key_states[:, None]
        rows = zip(self._layers(layer_idx), self._split(new), strict=True)
        return self._padded(new, [layer.update_indexer(keys[:, 0])[:, None] for layer, keys in rows])[:, 0]

    def _split(self, new: torch.Tensor) -> list[torch.Tensor]:
        """Return the new states of each row."""
        return [of_row.narrow(2, 0, count) for of_row, count in zip(torch.split(new, 1), self._counts, strict=True)]

    def _padded(self, new: torch.Tensor, written: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return states `[rows, heads, longest text + nodes, head_dim]`, given new ones and all of each row."""
        padded = new.new_zeros((*new.shape[:2], self._longest + new.shape[2], new.shape[3]))
        padded.narrow(2, self._longest, new.shape[2]).copy_(new)
        for of_row, states, text in zip(torch.split(padded, 1), written, self._texts, strict=True):
            of_row.narrow(2, 0, text.length).copy_(states.narrow(2, 0, text.length))
        return padded

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
