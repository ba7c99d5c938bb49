"""Keys and values of texts that share a forward pass, those of each text in a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers.cache_utils import Cache

from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer


class Row:
    """One text on a model: its keys and values. It belongs to no runner.

    Args:
        block: Tokens by which its room grows; see `TreeLayer.block`.

    Attributes:
        cache: The keys and values.
        most_pending: How many tokens of a text that is not cached yet the coming step sends at most; any number if
            `None`.
    """

    def __init__(self, block: int | None = None) -> None:
        self.cache = TreeCache(block=block)
        self.most_pending: int | None = None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept."""
        return self.cache.lengths(1)[0]

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.cache.allocated

    def copy_start(self, other: Row, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them."""
        self.cache.copy_start(other.cache, tokens)

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        self.cache.restore([tokens])

    def set_apart(self) -> None:
        """Nothing: no other row is compared with what this one holds."""


States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each row in one layer, each `[1, heads, tokens, head_dim]`, the nodes of the step at the end."""


class PackedCache(Cache):  # type: ignore[misc]
    """What a model takes for its cache in one pass over several rows.

    `update` sends the states of each row's nodes to the cache of that row. What it returns stands for them: the
    attention function finds by it what each row sees.

    Args:
        rows: The rows of the pass.
        bounds: Where the nodes of each begin and end in the row of tokens.
    """

    def __init__(self, rows: Sequence[Row], bounds: Sequence[tuple[int, int]]) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._rows = list(zip(rows, bounds, strict=True))
        self._states: dict[int, tuple[torch.Tensor, States]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[1, heads, nodes of all rows, head_dim]` of one layer; returns them as they are."""
        if len(self._rows) == 1:
            states = [self._rows[0][0].cache.update(key_states, value_states, layer_idx)]
        else:  # `narrow` does what a slice does, in a third of the time
            states = [
                row.cache.update(
                    key_states.narrow(2, start, end - start), value_states.narrow(2, start, end - start), layer_idx
                )
                for row, (start, end) in self._rows
            ]
        # Held with the tensor that stands for them, so that its identity stays its own.
        self._states[id(key_states)] = (key_states, states)
        return key_states, value_states

    def states(self, keys: torch.Tensor) -> States | None:
        """What `update` wrote when it returned `keys`; `None` for a tensor that it did not return."""
        found = self._states.get(id(keys))
        return None if found is None else found[1]

    @contextmanager
    def scratch(self, place: torch.Tensor | None = None) -> Iterator[None]:
        """While the pass runs: what it writes stays only if it is committed.

        Args:
            place: See `TreeCache.scratch`.
        """
        with ExitStack() as stack:
            for row, _ in self._rows:
                stack.enter_context(row.cache.scratch(place))
            yield
