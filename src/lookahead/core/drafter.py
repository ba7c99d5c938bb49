"""What every drafting method has in common: it proposes, and it learns from what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree


class Drafter(Protocol):
    """Proposes tokens for one sequence. Whatever it proposes, the text stays the same; only the steps get fewer."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; 0 if the likeliest alone will do."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self, tree: TokenTree) -> None:
        """Add candidate and window nodes to the tree of the coming step, likeliest path first."""

    def observe(self, result: StepResult) -> None:
        """Learn from the step. Called after every step, also after one for which nothing was asked (a long prefill)."""

    def statistics(self) -> dict[str, Any]:
        """What the drafter draws from, as plain numbers and lists: how much it holds and how often that was of use."""
