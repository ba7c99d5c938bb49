"""A drafter that is made when it is needed: calls in which drafting backs off throughout do not pay for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lookahead.core.budget import StepBudget
from lookahead.core.drafter import Drafter
from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, explain


class DeferredDrafter:
    """Keeps the text for a drafter while its budget backs off, and makes it for the first step that drafts.

    Args:
        make: Makes the drafter.
        budget: What it asks.
        statistics: What its statistics are before it is made.
    """

    def __init__(
        self, make: Callable[[], Drafter], budget: StepBudget, statistics: Callable[[], dict[str, Any]]
    ) -> None:
        self._make = make
        self._budget = budget
        self._statistics = statistics
        self._text: list[int] = []
        self._drafter: Drafter | None = None

    @property
    def top_k(self) -> int:
        """As many as the drafter wants; none before it is made."""
        return 0 if self._drafter is None else self._drafter.top_k

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._text = list(prompt)
        self._drafter = None

    def propose(self, tree: TokenTree) -> None:
        """Let the drafter propose, unless the budget backs off still."""
        if self._drafter is None:
            self._budget.begin()
            if self._budget.backs_off:
                return
            self._drafter = self._make()
            self._drafter.start(self._text)
        self._drafter.propose(tree)

    def explain(self, tree: TokenTree) -> Explanation:
        """What the drafter says."""
        return Explanation() if self._drafter is None else explain(self._drafter, tree)

    def observe(self, result: StepResult) -> None:
        """Let the drafter learn, or keep the tokens for it."""
        if self._drafter is None:
            self._text += result.tokens
        else:
            self._drafter.observe(result)

    def statistics(self) -> dict[str, Any]:
        """Of the drafter."""
        return self._statistics() if self._drafter is None else self._drafter.statistics()
