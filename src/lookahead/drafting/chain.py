"""The likeliest path of a tree, for models that run chains alone and drafters that know only trees.

`preset="auto"` searches for chains itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Drafter, StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, explain
from lookahead.drafting.best_first import first_path

SKETCHED_NODES = 64
"""Nodes of a tree, the root included, of which a path is sent as a chain."""


class ChainDrafter:
    """Lets a drafter propose a tree, and sends its likeliest path: of the nodes after each the one added first.

    The drafter learns from the nodes of that path; the others have no predictions.

    Args:
        drafter: Proposes the tree.
        nodes: Nodes of a step at most, pending tokens not counted but the root.
    """

    def __init__(self, drafter: Drafter, nodes: int) -> None:
        self._drafter = drafter
        self._most = nodes - 1
        self._tree: TokenTree | None = None  # what was sent
        self._sketch: TokenTree | None = None  # what the drafter proposed
        self._places: list[int] = []  # of the nodes of the one in the other
        self._prompt = True

    @property
    def top_k(self) -> int:
        """As many as the drafter wants."""
        return self._drafter.top_k

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._drafter.start(prompt)
        self._prompt = True
        self._tree = None

    def propose(self, tree: TokenTree) -> None:
        """Add the likeliest path of what the drafter proposes."""
        sketch = TokenTree(tree.tokens, tree.depths[tree.root] + tree.room)
        self._drafter.propose(sketch)
        if self._prompt:  # later pending tokens were read already, as candidates
            tree.needs_logits[:] = sketch.needs_logits[: len(tree)]
        first = sketch.root + 1
        path = first_path(range(first, len(sketch)), sketch.parents[first:], sketch.root)[: self._most]
        tree.add_candidates([sketch.tokens[node] for node in path])
        self._places = [*range(sketch.root + 1), *path]
        self._sketch, self._tree = sketch, tree

    def explain(self, tree: TokenTree) -> Explanation:
        """What the drafter says of those nodes that were sent."""
        if tree is not self._tree or self._sketch is None:
            return Explanation()
        explanation, first = explain(self._drafter, self._sketch), self._sketch.root + 1
        return Explanation(
            [explanation.origins[place - first] for place in self._places if place >= first], explanation.entries
        )

    def observe(self, result: StepResult) -> None:
        """Let the drafter learn from what was sent."""
        self._prompt = False
        drafted = result.tree is self._tree
        if drafted and self._sketch is not None:
            result = seen_in_sketch(result, self._sketch, self._places)
        self._drafter.observe(result)
        self._tree = self._sketch = None

    def statistics(self) -> dict[str, Any]:
        """Of the drafter."""
        return self._drafter.statistics()


def seen_in_sketch(result: StepResult, sketch: TokenTree, places: Sequence[int]) -> StepResult:
    """What came of a part of a proposed tree, as if all of that tree had been sent and the rest of it not read.

    Args:
        result: What came of the tree that was sent.
        sketch: The tree that was proposed.
        places: The node of `sketch` that each node sent is.
    """

    def spread(values: NDArray[Any], unread: int) -> NDArray[Any]:
        spread = np.full((len(sketch), *values.shape[1:]), unread, dtype=values.dtype)
        spread[list(places)] = values
        return spread

    return StepResult(
        sketch,
        spread(result.predictions, -1),
        [places[node] for node in result.path],
        result.tokens,
        spread(result.top_ids, -1),
        spread(result.top_probabilities, 0),
        result.samples,
    )
