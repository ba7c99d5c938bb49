"""Drafting: the methods that propose tokens, and nothing that could change the text."""

from __future__ import annotations

from lookahead.config import BUDGETED, MAX_NODES_PER_STEP, MOST_CHOSEN_NODES, OWN, LookaheadConfig
from lookahead.core.budget import StepBudget, ThroughputBudget
from lookahead.core.chain_budget import ChainBudget
from lookahead.core.draft_account import DraftAccount
from lookahead.core.drafter import Drafter, NoDrafter
from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.ngram_memory import NGramMemory
from lookahead.drafting.auto.predicted_text import PredictedText, text_sources
from lookahead.drafting.auto.source import CheckedSource, Source, TokenPaths
from lookahead.drafting.auto.texts import ContextMatches
from lookahead.drafting.auto.weights import SIBLINGS
from lookahead.drafting.chain import SKETCHED_NODES, ChainDrafter
from lookahead.drafting.checked_drafter import CheckedDrafter
from lookahead.drafting.deferred import DeferredDrafter
from lookahead.drafting.jacobi import JacobiBlockDrafter
from lookahead.drafting.paper import PaperDrafter
from lookahead.drafting.pool import NGramPool
from lookahead.drafting.token_recycling import TokenRecyclingDrafter
from lookahead.drafting.warm_up import compile_loops
from lookahead.drafting.window import JacobiWindow
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

__all__ = [
    "AutoDrafter",
    "ContextMatches",
    "DraftMemory",
    "Drafter",
    "JacobiBlockDrafter",
    "JacobiWindow",
    "NGramMemory",
    "NGramPool",
    "NoDrafter",
    "PaperDrafter",
    "PredictedText",
    "Source",
    "StepResult",
    "ThroughputBudget",
    "TokenPaths",
    "TokenRecyclingDrafter",
    "build_chain_drafter",
    "build_drafter",
    "compile_loops",
]


FIXED_BUDGET = 64
"""Nodes of a step, the root included, where neither a number nor costs are given."""


def build_drafter(
    config: LookaheadConfig,
    pool: NGramPool | None = None,
    memory: DraftMemory | None = None,
    account: DraftAccount | None = None,
    warm_up: int = 0,
    most: int = MAX_NODES_PER_STEP,
    vocabulary: int | None = None,
    budget: StepBudget | None = None,
    predicted: PredictedText | None = None,
) -> Drafter:
    """The drafter that `config.preset` names, with the sizes of `config`. One serves one sequence.

    Args:
        config: What to build.
        pool: The n-gram pool that the paper's method uses; a new one if not given.
        memory: The memory that `"auto"` drafts from and fills; a new one if not given.
        account: What steps cost and bring, for `"auto"` without a `step_budget`; `FIXED_BUDGET` nodes a step if not
            given.
        warm_up: How many of the last tokens of the prompt `"auto"` has the model's predictions read of.
        most: Nodes of a step at most, the root included, whatever the configuration or the costs allow.
        vocabulary: Tokens that the model knows, which drafters and sources of a user's own are held to.
        budget: Chooses the nodes of `"auto"`, instead of the configuration and the account.
        predicted: A text that is expected, which `"auto"` drafts from as well.
    """
    if config.drafter is not None:
        return CheckedDrafter(config.drafter, min(config.max_nodes, most), vocabulary)
    if config.preset in BUDGETED:
        fixed = min(config.step_budget or FIXED_BUDGET, most)
        if config.preset == "token_recycling":
            return TokenRecyclingDrafter(fixed)
        compile_loops()  # now: a step that compiled would say nothing of what steps cost
        if config.preset == "context_matches":
            return AutoDrafter(None, ContextMatches(), fixed, explore=False)
        chooses: int | StepBudget = fixed if budget is None else budget
        if budget is None and account is not None and config.step_budget is None:
            chooses = ThroughputBudget(account, min(most, MOST_CHOSEN_NODES))
        known = memory or DraftMemory()
        users = _own_sources(config, vocabulary)

        def make_auto() -> AutoDrafter:
            matches, own = text_sources(predicted, *users)
            parts = (known, matches, chooses)
            cap = min(most, MOST_CHOSEN_NODES)
            return AutoDrafter(*parts, cap, warm_up=warm_up, sources=own)

        # User-defined sources observe every step.
        if users or predicted is not None or isinstance(chooses, int):
            return make_auto()
        return DeferredDrafter(make_auto, chooses, known.statistics)
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


def build_chain_drafter(
    config: LookaheadConfig,
    memory: DraftMemory | None = None,
    account: DraftAccount | None = None,
    warm_up: int = 0,
    vocabulary: int | None = None,
    predicted: PredictedText | None = None,
) -> Drafter:
    """As `build_drafter`, for a model that runs chains alone.

    Raises:
        UnsupportedArgumentError: The method needs trees.
    """
    if config.preset == "paper":
        raise UnsupportedArgumentError(
            "preset='paper' is not supported for a model that runs chains alone: its lookahead window is a tree; use "
            "preset='auto'"
        )
    if config.preset not in (*BUDGETED, OWN):  # these draft chains
        return build_drafter(config)
    fixed = config.step_budget or FIXED_BUDGET
    if config.drafter is not None:
        return ChainDrafter(CheckedDrafter(config.drafter, config.max_nodes, vocabulary), fixed)
    sketched = max(SKETCHED_NODES, fixed)
    if config.preset == "token_recycling":
        return ChainDrafter(TokenRecyclingDrafter(sketched), fixed)
    compile_loops()
    if config.preset == "context_matches":
        return ChainDrafter(AutoDrafter(None, ContextMatches(), sketched, explore=False), fixed)
    budget = fixed if account is None or config.step_budget is not None else ChainBudget(account)
    memory = memory or DraftMemory()
    matches, own = text_sources(predicted, *_own_sources(config, vocabulary))
    parts = (memory, matches, sketched)
    return ChainDrafter(AutoDrafter(*parts, warm_up=warm_up, explore=False, sources=own), budget)


def _own_sources(config: LookaheadConfig, vocabulary: int | None) -> list[CheckedSource]:
    """New sources of the user's own.

    Raises:
        InvalidArgumentError: One of them is no source, or has the name of another.
    """
    sources = [CheckedSource(make(), vocabulary) for make in config.sources]
    names = [SIBLINGS]
    for source in sources:
        if source.name in names:
            raise InvalidArgumentError(f"sources have two called {source.name!r}; give each a name of its own")
        names.append(source.name)
    return sources
