"""Drafting: the methods that propose tokens, and nothing that could change the text."""

from __future__ import annotations

from lookahead.config import MAX_NODES_PER_STEP, MOST_CHOSEN_NODES, LookaheadConfig
from lookahead.core.pace import Pace, PacedRow
from lookahead.core.protocols import Drafter, NoDrafter, StepBudget, StepResult
from lookahead.core.shared_pace import SharedPace
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.predicted_text import PredictedText
from lookahead.drafting.auto.sources import Source, TokenPaths
from lookahead.drafting.background import once_compiled
from lookahead.drafting.checked import CheckedDrafter, CheckedSource
from lookahead.drafting.jacobi import JacobiBlockDrafter
from lookahead.drafting.paper import PaperDrafter
from lookahead.drafting.pool import NGramPool
from lookahead.drafting.token_recycling import TokenRecyclingDrafter
from lookahead.drafting.warm_up import compile_loops
from lookahead.drafting.window import JacobiWindow
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

__all__ = [
    "AutoDrafter",
    "DraftMemory",
    "Drafter",
    "JacobiBlockDrafter",
    "JacobiWindow",
    "NGramPool",
    "NoDrafter",
    "PaperDrafter",
    "PredictedText",
    "Source",
    "StepResult",
    "TokenPaths",
    "TokenRecyclingDrafter",
    "build_drafter",
    "compile_loops",
]

FIXED_BUDGET = 64
"""Nodes of a step, the root included, where neither a number nor costs are given."""


def build_drafter(  # noqa: PLR0913
    config: LookaheadConfig,
    pool: NGramPool | None = None,
    memory: DraftMemory | None = None,
    pace: Pace | SharedPace | None = None,
    most: int = MAX_NODES_PER_STEP,
    vocabulary: int | None = None,
    predicted: PredictedText | None = None,
    chains: bool = False,
) -> Drafter:
    """The drafter that `config.preset` names, with the sizes of `config`. One serves one sequence.

    Args:
        config: What to build.
        pool: The n-gram pool that the paper's method uses; a new one if not given.
        memory: The memory that `"auto"` drafts from and fills; a new one if not given.
        pace: Chooses the nodes of `"auto"`: those of this text, without a `step_budget`, or of all texts of a step;
            `FIXED_BUDGET` nodes a step if not given.
        most: Nodes of a step at most, the root included, whatever the configuration or the costs allow.
        vocabulary: Tokens that the model knows, which sources of a user's own are held to.
        predicted: A text that is expected, which `"auto"` drafts from as well.
        chains: Whether drafts are single paths, for a model that runs no trees.

    Raises:
        UnsupportedArgumentError: The method needs trees.
    """
    fixed = min(config.step_budget or FIXED_BUDGET, most)
    if config.drafter is not None:
        return CheckedDrafter(config.drafter, min(config.max_nodes, most), fixed if chains else None)
    if config.preset == "autoregressive":
        return NoDrafter()
    if config.preset == "jacobi":
        return JacobiBlockDrafter(config.block_size, config.max_iterations or config.block_size, config.seed)
    if config.preset == "token_recycling":
        return TokenRecyclingDrafter(fixed, chains)
    if config.preset == "paper":
        return _paper_drafter(config, pool, chains)
    if config.preset == "context_matches":
        return once_compiled(AutoDrafter(None, fixed, chains=chains))
    cap = min(most, MOST_CHOSEN_NODES)
    budget: int | StepBudget = fixed
    if isinstance(pace, SharedPace):
        budget = pace
    elif pace is not None and config.step_budget is None:
        budget = PacedRow(pace, resends=chains, most=cap)
    sources = _checked_sources(config, vocabulary)
    drafter = AutoDrafter(memory or DraftMemory(), budget, cap, sources=sources, predicted=predicted, chains=chains)
    return once_compiled(drafter)


def _paper_drafter(config: LookaheadConfig, pool: NGramPool | None, chains: bool) -> PaperDrafter:
    if chains:
        raise UnsupportedArgumentError(
            "preset='paper' is not supported for a model that runs chains alone: its lookahead window is a tree; use "
            "preset='auto'"
        )
    return PaperDrafter(
        JacobiWindow(config.window_size, config.ngram_size, config.seed),
        NGramPool(config.ngram_size, config.guess_set_size) if pool is None else pool,
        config.pool_from_prompt,
        config.pool_from_prompt if config.pool_from_output is None else config.pool_from_output,
    )


def _checked_sources(config: LookaheadConfig, vocabulary: int | None) -> list[Source]:
    """New sources of the user's own.

    Raises:
        InvalidArgumentError: One of them is no source, or has the name of another.
    """
    sources: dict[str, Source] = {}
    for make in config.sources:
        source = CheckedSource(make(), vocabulary)
        if source.name in sources:
            raise InvalidArgumentError(f"sources have two called {source.name!r}; give each a name of its own")
        sources[source.name] = source
    return [*sources.values()]
