"""Drafts for engines that show no logits: `preset="auto"` where the text is all there is to learn from.

The n-gram memory holds what followed in prompts and outputs instead of what a model predicted: the running frequency of
continuations. Weights begin as they were fitted to recorded answers of large models.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.drafting.auto.context_matches import ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.ngram_memory import NGramMemory
from lookahead.drafting.auto.predicted_text import PredictedText
from lookahead.drafting.auto.scorer import Acceptance
from lookahead.drafting.auto.source import Source
from lookahead.drafting.auto.text_priors import TEXT_PRIORS
from lookahead.drafting.chain import ChainDrafter

ORDERS = len(TEXT_PRIORS["nothing"]) - 1
"""Longest context of the memory, in tokens."""

OLD_SHARE = 0.7
"""What a frequency keeps of itself each time; a token that followed once counts the rest."""

SKETCHED = 64
"""Nodes of the tree of which a chain is the best path."""


def text_memory(capacity: int = 1 << 15) -> DraftMemory:
    """A memory of texts. Requests that share one draft from each other's texts; what is oldest makes room.

    Args:
        capacity: Contexts kept of each length.
    """
    ngrams = NGramMemory(ORDERS, capacity, old_share=OLD_SHARE, observed=True)
    return DraftMemory(ngrams, Acceptance(ORDERS, priors=TEXT_PRIORS))


def build_text_drafter(
    nodes: int,
    memory: DraftMemory | None = None,
    predicted: PredictedText | None = None,
    sources: Sequence[Source] = (),
) -> AutoDrafter:
    """A drafter of trees for one sequence.

    Args:
        nodes: Nodes of a step, the root included.
        memory: From `text_memory`, for several sequences one after another or at once; one of its own if not given.
        predicted: A text that is expected.
        sources: What else lists paths before each step.
    """
    matches = ContextMatches(before=() if predicted is None else predicted.tokens)
    own = [*sources, *([] if predicted is None else [predicted])]
    return AutoDrafter(memory or text_memory(), matches, None, nodes, explore=False, sources=own)


def build_text_chain_drafter(
    nodes: int,
    memory: DraftMemory | None = None,
    predicted: PredictedText | None = None,
    sources: Sequence[Source] = (),
) -> ChainDrafter:
    """As `build_text_drafter`, of chains."""
    return ChainDrafter(build_text_drafter(max(nodes, SKETCHED), memory, predicted, sources), nodes)
