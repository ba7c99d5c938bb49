"""Drafting: methods that propose tokens, and cannot change the text."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.config import MAX_NODES_PER_STEP, MOST_CHOSEN_NODES, LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.protocols import Drafter, NoDrafter, StepBudget
from lookahead.core.results import StepResult
from lookahead.core.shared_pace import SharedPace
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.sources import PredictedText, Source, TokenPaths
from lookahead.drafting.background import compile_loops, once_compiled
from lookahead.drafting.checked import CheckedDrafter, CheckedSource
from lookahead.drafting.jacobi import JacobiBlockDrafter
from lookahead.drafting.paper import JacobiWindow, NGramPool, PaperDrafter
from lookahead.drafting.racer import RacerDrafter
from lookahead.drafting.suffix_decoding import SuffixDecodingDrafter
from lookahead.drafting.token_recycling import TokenRecyclingDrafter
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
    "RacerDrafter",
    "Source",
    "StepResult",
    "SuffixDecodingDrafter",
    "TokenPaths",
    "TokenRecyclingDrafter",
    "build_drafter",
    "compile_loops",
]

FIXED_BUDGET = 64
"""Nodes of a step, the root included, without a step budget or a pace."""

_Make = Callable[[LookaheadConfig, int, bool], Drafter]
"""Function that makes the drafter of a preset from its options, the nodes of a step, and whether it drafts chains."""

_METHODS: dict[str, _Make] = {
    "autoregressive": lambda config, nodes, chains: NoDrafter(),
    "jacobi": lambda config, nodes, chains: JacobiBlockDrafter(
        config.block_size, config.max_iterations or config.block_size, config.seed
    ),
    "token_recycling": lambda config, nodes, chains: TokenRecyclingDrafter(nodes, chains),
    "context_matches": lambda config, nodes, chains: once_compiled(AutoDrafter(None, nodes, chains=chains)),
    "suffix_decoding": lambda config, nodes, chains: SuffixDecodingDrafter(
        nodes, config.suffix_factor, config.suffix_offset, config.suffix_min_probability, config.suffix_depth, chains
    ),
    "racer": lambda config, nodes, chains: RacerDrafter(
        nodes, config.racer_ngram_size, config.racer_breadth, config.racer_capacity, chains
    ),
}
"""Methods with a fixed number of nodes that need nothing from the call."""


def build_drafter(  # noqa: PLR0913
    config: LookaheadConfig,
    pool: NGramPool | None = None,
    memory: DraftMemory | None = None,
    pace: Pace | SharedPace | None = None,
    max_nodes: int = MAX_NODES_PER_STEP,
    vocabulary: int | None = None,
    predicted: PredictedText | None = None,
    chains: bool = False,
) -> Drafter:
    """Return the drafter for `config.preset`, with the sizes of `config`. A drafter serves one sequence.

    Args:
        config: Configuration of the drafter.
        pool: N-gram pool of the paper's method; a new one by default.
        memory: Memory of `"auto"`; a new one by default.
        pace: Chooses the nodes of `"auto"`: a `Pace` for this text, without a `step_budget`, or a `SharedPace` for all
            texts of a step. By default a step has `FIXED_BUDGET` nodes.
        max_nodes: Maximum number of nodes of a step, the root included, above any other limit.
        vocabulary: Vocabulary size of the model; user-defined sources must stay inside.
        predicted: Predicted output, a further source of `"auto"`.
        chains: Whether drafts are single paths, for a model that cannot run trees.

    Raises:
        UnsupportedArgumentError: The preset needs trees.
    """
    fixed = min(config.step_budget or FIXED_BUDGET, max_nodes)
    if config.drafter is not None:
        return CheckedDrafter(config.drafter, min(config.max_nodes, max_nodes), fixed if chains else None)
    if config.preset in _METHODS:
        return _METHODS[config.preset](config, fixed, chains)
    if config.preset == "paper":
        return _paper_drafter(config, pool, chains)
    cap = min(max_nodes, MOST_CHOSEN_NODES)
    budget: int | StepBudget = fixed
    if pace is not None and (pace.is_shared or config.step_budget is None):
        budget = pace.budget_of_text(chains, cap)
    sources = _checked_sources(config, vocabulary)
    drafter = AutoDrafter(memory or DraftMemory(), budget, cap, sources=sources, predicted=predicted, chains=chains)
    return once_compiled(drafter)


def _paper_drafter(config: LookaheadConfig, pool: NGramPool | None, chains: bool) -> PaperDrafter:
    if chains:
        raise UnsupportedArgumentError(
            "preset='paper' is not supported for a model that runs only chains: its lookahead window is a tree; use "
            "preset='auto'"
        )
    return PaperDrafter(
        JacobiWindow(config.window_size, config.ngram_size, config.seed),
        NGramPool(config.ngram_size, config.guess_set_size) if pool is None else pool,
        config.pool_from_prompt,
        config.pool_from_prompt if config.pool_from_output is None else config.pool_from_output,
    )


def _checked_sources(config: LookaheadConfig, vocabulary: int | None) -> list[Source]:
    """Create the user-defined sources.

    Raises:
        InvalidArgumentError: One of them is no source, or two have the same name.
    """
    sources: dict[str, Source] = {}
    for make in config.sources:
        source = CheckedSource(make(), vocabulary)
        if source.name in sources:
            raise InvalidArgumentError(f"sources has two named {source.name!r}; give each source its own name")
        sources[source.name] = source
    return [*sources.values()]
