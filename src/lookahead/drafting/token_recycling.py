"""Token recycling (arXiv 2408.08696): draft the model's latest predictions after the same token."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, Origin


class TokenRecyclingDrafter:
    """Drafter of the likeliest tree through the model's last `top_k` predictions after each token.

    The published method uses one fixed tree for every step. Here the tree grows best-first by the product of the
    probabilities along the path: no tree has to be designed for each budget, and drafts are at least as good.

    Args:
        budget: Nodes of a step, the root included. At least 1.
        chains: Draft only the likeliest token after each token, for models that cannot run trees.
    """

    top_k = 8

    def __init__(self, budget: int, chains: bool = False) -> None:
        self.budget = budget
        self._followers: dict[int, list[tuple[int, float]]] = {}
        self._predictions = 1 if chains else self.top_k

    def start(self, prompt: Sequence[int]) -> None:
        """Do nothing: predictions hold for any text."""

    def propose(self, tree: TokenTree) -> None:
        """Add the likeliest paths, the likeliest node first."""
        queue: list[tuple[float, int, int, int]] = []  # minus the probability, tie-breaker, parent, token
        node = tree.root
        probability = 1.0
        pushed = count()
        for _ in range(self.budget - 1):
            if tree.depths[node] - tree.depths[tree.root] < tree.room:
                for token, share in self._followers.get(tree.tokens[node], ()):
                    if token < tree.vocabulary:
                        heappush(queue, (-probability * share, next(pushed), node, token))
            if not queue:
                return
            negative, _, parent, token = heappop(queue)
            (node,) = tree.add_candidates([token], parent)
            probability = -negative

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the probability of each node, and the last prediction after the same token as its source."""
        likely = {tree.root: 1.0}
        for node in range(tree.root + 1, len(tree)):
            followers = dict(self._followers.get(tree.tokens[tree.parents[node]], ()))
            likely[node] = likely[tree.parents[node]] * followers.get(tree.tokens[node], 0.0)
        nodes = range(tree.root + 1, len(tree))
        origins = [Origin(("last prediction after the token",), likely[node]) for node in nodes]
        return Explanation(origins, len(self._followers))

    def observe(self, result: StepResult) -> None:
        """Store the predictions after every node; for equal tokens the last node in the tree counts."""
        listed = zip(result.top_ids.tolist(), result.top_probabilities.tolist(), strict=True)
        for token, (ids, shares) in zip(result.tree.tokens, listed, strict=True):
            if ids and ids[0] >= 0:
                self._followers[token] = list(zip(ids, shares, strict=True))[: self._predictions]

    def statistics(self) -> dict[str, Any]:
        """Return the number of tokens with stored predictions."""
        return {"entries": len(self._followers)}
