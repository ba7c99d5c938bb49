"""The likeliest path of a tree, for models that run chains alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import StepBudget
from lookahead.core.protocols import Drafter, StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, explain
from lookahead.drafting.auto.drafter import AutoDrafter

SKETCHED_NODES = 64
"""Nodes of a tree, the root included, of which the best path is sent as a chain."""


@runtime_checkable
class ScoredDrafter(Drafter, Protocol):
    """A drafter that says how likely its nodes are."""

    @property
    def path_probabilities(self) -> NDArray[np.float64]:
        """Probability that each node that `propose` added is accepted, in the order of the nodes."""


class ChainDrafter:
    """Lets a drafter propose a tree, and sends the one path of it that promises the most tokens.

    The drafter learns from the nodes of that path; the others have no predictions.

    Args:
        drafter: Proposes the tree.
        budget: Nodes of a step at most, pending tokens not counted but the root, or what chooses them.
    """

    def __init__(self, drafter: Drafter, budget: int | StepBudget) -> None:
        self._drafter = drafter
        self._scored = drafter if isinstance(drafter, ScoredDrafter) else None
        self._most = budget - 1 if isinstance(budget, int) else MOST_CHOSEN_NODES
        self._budget = None if isinstance(budget, int) else budget
        self._tree: TokenTree | None = None  # what was sent
        self._sketch: TokenTree | None = None  # what the drafter proposed
        self._places: list[int] = []  # of the nodes of the one in the other
        self._prompt = True

    @property
    def top_k(self) -> int:
        """As many as the drafter wants; none while drafting backs off."""
        return 0 if self._backs_off else self._drafter.top_k

    @property
    def _backs_off(self) -> bool:
        return self._budget is not None and self._budget.backs_off

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._drafter.start(prompt)
        self._prompt = True
        self._tree = None

    def propose(self, tree: TokenTree) -> None:
        """Add the best path of what the drafter proposes."""
        self._tree = None
        if self._budget is not None:
            self._budget.begin()
        if self._backs_off:
            if isinstance(self._drafter, AutoDrafter):
                self._drafter.propose_certain(tree)
            return
        sketch = TokenTree(tree.tokens, tree.depths[tree.root] + tree.room)
        sketch.foresee = tree.foresee
        self._drafter.propose(sketch)
        if self._prompt:  # later pending tokens were read already, as candidates
            tree.needs_logits[:] = sketch.needs_logits[: len(tree)]
        scores = None if self._scored is None else self._scored.path_probabilities
        path = _first_path(sketch) if scores is None else _best_path(sketch, scores)
        path = path[: self._most]

        def send(count: int) -> None:
            tree.add_candidates([sketch.tokens[node] for node in path[:count]])
            self._places = [*range(sketch.root + 1), *path[:count]]
            self._sketch, self._tree = sketch, tree

        if self._budget is None or scores is None:
            send(len(path))
            return
        likely = scores[np.array(path, dtype=np.int64) - sketch.root - 1]
        self._budget.offer(likely, send, tree.root + 1)

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


def _first_path(tree: TokenTree) -> list[int]:
    """The path of those that were added first, below the root."""
    path, node = [], tree.root
    for place in range(tree.root + 1, len(tree)):
        if tree.parents[place] == node:
            path.append(place)
            node = place
    return path


def _best_path(tree: TokenTree, probabilities: NDArray[np.float64]) -> list[int]:
    """The path of which the most tokens are to be expected; `probabilities` are those of the nodes below the root."""
    first = tree.root + 1
    expected = [0.0] * len(tree)
    for node, probability in enumerate(probabilities.tolist(), start=first):
        expected[node] = expected[tree.parents[node]] + probability
    node = max(range(tree.root, len(tree)), key=expected.__getitem__)
    path = []
    while node >= first:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]
