"""Token recycling (arXiv 2408.08696): draft from what the model last predicted after the same token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, Origin
from lookahead.drafting.auto.ngrams import NGramMemory
from lookahead.drafting.best_first import grow


class TokenRecyclingDrafter:
    """Keeps the model's last `top_k` predictions after each token and drafts the likeliest tree through them.

    The published method uses one fixed tree for every step; here the tree grows best-first by the product of the
    probabilities along the path, which needs no tree to be designed for each budget and drafts at least as well.

    Args:
        budget: Nodes of a step, the root included. At least 1.
        memory: Contexts of one token; a new memory if not given.
    """

    def __init__(self, budget: int, memory: NGramMemory | None = None) -> None:
        self.budget = budget
        self.memory = NGramMemory(orders=1, old_share=0.0) if memory is None else memory
        self.top_k = self.memory.top_k

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin: what the memory holds is good for any text."""

    def propose(self, tree: TokenTree) -> None:
        """Add the likeliest paths, the likeliest node first."""
        grow(tree, self.budget - 1, self._followers)

    def explain(self, tree: TokenTree) -> Explanation:
        """All nodes are predictions that the model made last after the same token."""
        followers: dict[int, dict[int, float]] = {}
        likely = {tree.root: 1.0}
        for node in range(tree.root + 1, len(tree)):
            before = tree.tokens[tree.parents[node]]
            if before not in followers:
                followers[before] = dict(self._followers(before))
            likely[node] = likely[tree.parents[node]] * followers[before].get(tree.tokens[node], 0.0)
        nodes = range(tree.root + 1, len(tree))
        origins = [Origin(("last prediction after the token",), likely[node]) for node in nodes]
        return Explanation(origins, sum(self.memory.statistics().entries))

    def observe(self, result: StepResult) -> None:
        """Keep the predictions after every node; of equal tokens the one that was added last counts."""
        read = np.flatnonzero(result.predictions >= 0)
        tokens = np.array(result.tree.tokens, dtype=np.int64)[read, None]
        self.memory.insert(tokens, result.top_ids[read], result.top_probabilities[read])

    def statistics(self) -> dict[str, Any]:
        """Of the memory; see `MemoryStatistics`."""
        return asdict(self.memory.statistics())

    def _followers(self, token: int) -> Iterator[tuple[int, float]]:
        """What the model predicted last after a token, and how likely it was."""
        _, ids, shares = self.memory.lookup(np.array([[token]], dtype=np.int64))
        listed = zip(ids[0, 0].tolist(), shares[0, 0].tolist(), strict=True)
        return ((follower, share) for follower, share in listed if follower >= 0)
