"""Drafts for engines that show no logits: `preset="auto"` where the text is all there is to learn from.

The n-gram memory holds what followed in prompts and outputs instead of what a model predicted: the running frequency of
continuations. Weights begin as they were fitted to recorded answers of large models.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core.protocols import FixedBudget
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.ngrams import OLD_SHARE
from lookahead.drafting.auto.predicted_text import PredictedText
from lookahead.drafting.auto.sources import Source
from lookahead.drafting.auto.weights import TEXT_WEIGHTS

ORDERS = len(TEXT_WEIGHTS["nothing"]) - 1
"""Longest context of the memory, in tokens."""


def text_memory(capacity: int = 1 << 15) -> DraftMemory:
    """A memory of texts. Requests that share one draft from each other's texts; what is oldest makes room.

    Args:
        capacity: Contexts kept of each length.
    """
    return DraftMemory(ORDERS, capacity, old_share=OLD_SHARE, observed=True)


def build_text_drafter(
    nodes: int,
    memory: DraftMemory | None = None,
    predicted: PredictedText | None = None,
    sources: Sequence[Source] = (),
    least: float = 0.0,
    chains: bool = False,
) -> AutoDrafter:
    """A drafter for one sequence.

    Args:
        nodes: Nodes of a step at most, the root included.
        memory: From `text_memory`, for several sequences one after another or at once; one of its own if not given.
        predicted: A text that is expected.
        sources: What else lists paths before each step.
        least: Least probability that a drafted token is accepted. Steps are filled up to `nodes` if not given.
        chains: Draft single paths, else trees.
    """
    budget = FixedBudget(nodes, least)
    return AutoDrafter(memory or text_memory(), budget, nodes, sources=sources, predicted=predicted, chains=chains)
