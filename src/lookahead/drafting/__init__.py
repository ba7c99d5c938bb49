"""Drafting: the methods that propose tokens, and nothing that could change the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.config import BUDGETED, LookaheadConfig
from lookahead.core.budget import StepCosts, ThroughputBudget
from lookahead.core.drafter import Drafter
from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.auto.context_matches import ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.embedding_neighbours import EmbeddingNeighbours
from lookahead.drafting.auto.ngram_memory import NGramMemory
from lookahead.drafting.jacobi import JacobiBlockDrafter
from lookahead.drafting.paper import PaperDrafter
from lookahead.drafting.pool import NGramPool
from lookahead.drafting.token_recycling import TokenRecyclingDrafter
from lookahead.drafting.warm_up import compile_loops
from lookahead.drafting.window import JacobiWindow

__all__ = [
    "AutoDrafter",
    "ContextMatches",
    "DraftMemory",
    "Drafter",
    "EmbeddingNeighbours",
    "JacobiBlockDrafter",
    "JacobiWindow",
    "NGramMemory",
    "NGramPool",
    "NoDrafter",
    "PaperDrafter",
    "StepCosts",
    "StepResult",
    "ThroughputBudget",
    "TokenRecyclingDrafter",
    "build_drafter",
    "compile_loops",
]


FIXED_BUDGET = 64
"""Nodes of a step, the root included, where neither a number nor costs are given."""


class NoDrafter:
    """Proposes nothing: plain autoregressive decoding, one token a step."""

    top_k = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin."""

    def propose(self, tree: TokenTree) -> None:
        """The tree stays as it is."""

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""

    def statistics(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}


def build_drafter(
    config: LookaheadConfig,
    pool: NGramPool | None = None,
    memory: DraftMemory | None = None,
    costs: StepCosts | None = None,
    rows: int = 1,
    neighbours: EmbeddingNeighbours | None = None,
    warm_up: int = 0,
) -> Drafter:
    """The drafter that `config.preset` names, with the sizes of `config`. One serves one sequence.

    Args:
        config: What to build.
        pool: The n-gram pool that the paper's method uses; a new one if not given.
        memory: The memory that `"auto"` drafts from and fills; a new one if not given.
        costs: What steps cost, for `"auto"` without a `step_budget`; `FIXED_BUDGET` nodes a step if not given.
        rows: Sequences that share each step.
        neighbours: Which tokens of the model resemble each other, for `"auto"`; unknown if not given.
        warm_up: How many of the last tokens of the prompt `"auto"` has the model's predictions read of.
    """
    if config.preset in BUDGETED:
        fixed = config.step_budget or FIXED_BUDGET
        if config.preset == "token_recycling":
            return TokenRecyclingDrafter(fixed)
        compile_loops()  # now: a step that compiled would say nothing of what steps cost
        if config.preset == "context_matches":
            return AutoDrafter(None, ContextMatches(), None, fixed, explore=False)
        budget = ThroughputBudget(costs, rows) if costs is not None and config.step_budget is None else fixed
        return AutoDrafter(
            memory or DraftMemory(), ContextMatches(), None, budget, warm_up=warm_up, neighbours=neighbours
        )
    if config.preset == "autoregressive":
        return NoDrafter()
    if config.preset == "jacobi":
        return JacobiBlockDrafter(config.block_size, config.max_iterations or config.block_size, config.seed)
    return PaperDrafter(
        JacobiWindow(config.window_size, config.ngram_size, config.seed),
        NGramPool(config.ngram_size, config.guess_set_size) if pool is None else pool,
        config.pool_from_prompt,
        config.pool_from_prompt if config.pool_from_output is None else config.pool_from_output,
    )
