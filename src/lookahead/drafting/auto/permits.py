"""Which nodes of a draft can come true: sources that know what is impossible say so, and it is not sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError


class Permits:
    """Asks those sources that have a method `permits`.

    It takes the tokens of a draft, `[nodes]`, and their parents, `[nodes]`: 0 for the text itself, 1 for the first
    node, and so on; a parent comes before its children. It returns for each node whether it can come true after its
    parent, `[nodes]` bool. What it says of nodes below one that cannot is of no account.

    Args:
        sources: The sources of one sequence.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self._asked = [source for source in sources if getattr(source, "permits", None) is not None]

    @property
    def asks(self) -> bool:
        """Whether there is one."""
        return bool(self._asked)

    def rows(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The nodes that can come true, numbered like `parents`, with 0 before them.

        Raises:
            InvalidArgumentError: A source does not tell it of each node.
        """
        if not self._asked or not len(tokens):
            return np.arange(len(tokens) + 1)
        can = np.ones(len(tokens) + 1, dtype=bool)
        for source in self._asked:
            told = np.asarray(source.permits(tokens.tolist(), parents.tolist()), dtype=bool)
            if told.shape != tokens.shape:
                raise InvalidArgumentError(
                    f"source {source.name!r}: permits told {told.shape} of {len(tokens)} nodes; tell it of each"
                )
            can[1:] &= told
        for node, parent in enumerate(parents.tolist(), 1):
            can[node] &= can[parent]
        return np.flatnonzero(can)
