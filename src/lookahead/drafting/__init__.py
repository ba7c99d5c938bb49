"""Drafting: the methods that propose tokens, and nothing that could change the text."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.config import LookaheadConfig
from lookahead.drafting.drafter import Drafter, StepResult
from lookahead.drafting.jacobi_block import JacobiBlockDrafter
from lookahead.drafting.jacobi_window import JacobiWindow
from lookahead.drafting.ngram_pool import NGramPool
from lookahead.drafting.paper import PaperDrafter
from lookahead.token_tree import TokenTree

__all__ = [
    "Drafter",
    "JacobiBlockDrafter",
    "JacobiWindow",
    "NGramPool",
    "NoDrafter",
    "PaperDrafter",
    "StepResult",
    "build_drafter",
]


class NoDrafter:
    """Proposes nothing: plain autoregressive decoding, one token a step."""

    top_k = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin."""

    def propose(self, tree: TokenTree) -> None:
        """The tree stays as it is."""

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


def build_drafter(config: LookaheadConfig, pool: NGramPool | None = None) -> Drafter:
    """The drafter that `config.preset` names, with the sizes of `config`. One serves one sequence.

    Args:
        config: What to build.
        pool: The n-gram pool that the paper's method uses; a new one if not given.
    """
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
