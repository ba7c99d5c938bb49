"""What is kept of texts that come and go: keys and values, or running states, of each in a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from lookahead.backends.base import TextRow
from lookahead.backends.transformers.static_cache import StaticTreeCache
from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer


class Row(TextRow):
    """One text on a model: its keys and values.

    Args:
        cache: The keys and values; an empty cache if not given.
        block: Tokens by which the room of that grows; see `TreeLayer`.

    Attributes:
        cache: As above.
        padding: How many padding tokens its prompt had; they count where transformers counts them.
    """

    padding = 0

    def __init__(self, cache: TreeCache | None = None, block: int | None = None) -> None:
        self.cache = TreeCache(block=block) if cache is None else cache

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens whose keys and values are kept."""
        return self.cache.length

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.cache.allocated

    def copy_start(self, other: Row, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them."""
        self.cache.copy_start(other.cache, tokens)

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        self.cache.crop(tokens)

    def adopt(self, cache: TreeCache) -> None:
        """Begin with what a cache holds."""
        cache.keep_all()
        self.cache.copy_start(cache, cache.length)


class StaticRow(TextRow):
    """One row of static buffers.

    Args:
        cache: The keys and values of all rows.
        place: Which row it is.

    Attributes:
        padding: See `Row`.
    """

    padding = 0

    def __init__(self, cache: StaticTreeCache, place: int) -> None:
        self._cache, self._place = cache, place

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens whose keys and values are kept."""
        return self._cache.lengths[self._place]

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        self._cache.crop(tokens, self._place)


States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class RowsCache(Cache):  # type: ignore[misc]
    """What a model takes for its cache in one pass over several rows, each of which has its own.

    Args:
        rows: The rows of the pass.
        counts: Nodes of each.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, counts, strict=True))


class PackedCache(RowsCache):
    """The rows lie one after another in one row of tokens.

    `update` sends the states of each row's nodes to the cache of that row. What it returns stands for them: the
    attention function finds by it what each row sees.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
        self._states: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer; returns them as they are."""
        states, start = [], 0
        for row, count in self._rows:
            keys, values = key_states, value_states
            if len(self._rows) > 1:  # `narrow` does what a slice does, in a third of the time
                keys, values = keys.narrow(2, start, count), values.narrow(2, start, count)
            states.append(row.cache.update(keys, values, layer_idx))
            start += count
        # Held with the tensor that stands for them, so that its identity stays its own.
        self._states[id(key_states)] = (key_states, states)
        return key_states, value_states

    def states(self, keys: torch.Tensor) -> States | None:
        """What `update` wrote when it returned `keys`; `None` for a tensor that it did not return."""
        found = self._states.get(id(keys))
        return None if found is None else found[1]


class PaddedCache(RowsCache):
    """The rows are those of a batch, padded to the largest.

    `update` writes the states of each row's nodes to the cache of that row, and returns a copy of all rows: the nodes
    stand behind the longest text, and what lies between is hidden by the mask.
    """

    def __init__(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        super().__init__(rows, counts)
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

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The same for the keys `[rows, nodes, size]` of the indexer of one layer."""
        new = indexer_key_states[:, None]
        found = [
            row.cache.update_indexer(indexer_key_states[place, None, :count], layer_idx)[:, None]
            for place, (row, count) in enumerate(self._rows)
        ]
        return self._padded(found, new)[:, 0]

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
