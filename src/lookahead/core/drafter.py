"""The protocol of drafting methods: propose tokens, and learn from the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree


class Drafter(Protocol):
    """Proposes tokens for one sequence. Proposals change the number of steps, never the text."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; 0 if the likeliest alone will do."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self, tree: TokenTree) -> None:
        """Add candidate and window nodes to the tree of the coming step, likeliest path first."""

    def observe(self, result: StepResult) -> None:
        """Learn from the step. Called after every step, also after one without `propose` (a long prefill)."""

    def statistics(self) -> dict[str, Any]:
        """Sizes and hit counts of what the drafter holds, as plain numbers and lists."""


class RowsDrafter(Drafter, Protocol):
    """A drafter that drafts and learns for several sequences in one call, each of which has a drafter of its own."""

    @property
    def drafts_together(self) -> bool:
        """Whether it does so now. What is raised then ends the drafts of all sequences of the call."""

    @classmethod
    def propose_rows(cls, drafters: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """`propose` of several drafters of this class."""

    @classmethod
    def observe_rows(cls, drafters: Sequence[Any], results: Sequence[StepResult]) -> None:
        """`observe` of several drafters of this class."""


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
