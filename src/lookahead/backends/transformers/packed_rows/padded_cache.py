"""Keys and values of texts that share a padded pass, those of each text in a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers.cache_utils import Cache

from lookahead.backends.transformers.packed_rows.cache import Row
from lookahead.backends.transformers.tree_cache import TreeLayer


class PaddedCache(Cache):  # type: ignore[misc]
    """What a model takes for its cache in one pass over several rows, whose trees are padded to the largest.

    `update` writes the states of each row's nodes to the cache of that row, and returns a copy of all rows: the nodes
    stand behind the longest text, and what lies between is hidden by the mask.

    Args:
        rows: The rows of the pass.
        counts: Nodes of each, without padding.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, counts, strict=True))
        self._longest = max(row.length for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[rows, heads, nodes, head_dim]` of one layer; returns those of all tokens and nodes."""
        found = [
            row.cache.update(key_states[place, None, :, :count], value_states[place, None, :, :count], layer_idx)
            for place, (row, count) in enumerate(self._rows)
        ]
        keys, values = zip(*found, strict=True)
        return self._padded(keys, key_states), self._padded(values, value_states)

    def _padded(self, rows: Sequence[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, longest text + nodes, head_dim]`."""
        padded = new.new_zeros((*new.shape[:2], self._longest + new.shape[2], new.shape[3]))
        for place, (states, (_, count)) in enumerate(zip(rows, self._rows, strict=True)):
            before = states.shape[2] - count
            padded[place, :, :before] = states[0, :, :before]
            padded[place, :, self._longest : self._longest + count] = states[0, :, before:]
        return padded

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens kept of the longest text."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a query sees, and where they begin."""
        return self._longest + query_length, 0

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """While the pass runs: what it writes stays only if it is committed."""
        with ExitStack() as stack:
            for row, _ in self._rows:
                stack.enter_context(row.cache.scratch())
            yield
