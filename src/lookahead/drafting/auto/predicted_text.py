"""Predicted output: drafts from a text that the user expects, for example a file before an edit."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core.results import StepResult
from lookahead.drafting.auto.sources import TokenPaths

NEARBY = 64
"""Tokens proposed at each index of the predicted text, and tokens searched for the index after a change."""

PLACES = 4
"""Maximum number of indices where the text may continue."""


class PredictedText:
    """Source (`Source`) of the continuation of a predicted output.

    While the output follows the predicted text, there is one index where it continues. After a deviating token there
    are several: the token was replaced, was inserted, or tokens were deleted. The first index that matches is the next
    one.

    Args:
        tokens: Token ids of the predicted text.

    Attributes:
        tokens: Token ids of the predicted text.
        accepted: Output tokens that matched the predicted text.
    """

    name = "predicted text"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._places = [0]
        self._changed = 0  # tokens since the output deviated from the predicted text
        self.accepted = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence at the start of the predicted text."""
        self._places = [0]
        self._changed = 0
        self.accepted = 0

    def propose(self) -> TokenPaths:
        """Return the continuations at each index where the text may continue."""
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for place in self._places:
            node = -1
            for token in self.tokens[place : place + NEARBY]:
                if (node, token) not in children:
                    children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node, token]
        return TokenPaths(tokens, parents, [1.0] * len(tokens))

    def observe(self, result: StepResult) -> None:
        """Follow the new tokens in the predicted text."""
        for token in result.tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        for place in self._places:
            if place < len(self.tokens) and self.tokens[place] == token:
                self._places = [place + 1]
                self._changed = 0
                self.accepted += 1
                return
        self._changed += 1
        left = self._places[-1]  # index where the output deviated from the predicted text
        behind = [
            place + 1
            for place in range(left, min(left + NEARBY, len(self.tokens)))
            if self.tokens[place] == token and place != left
        ]
        self._places = [*dict.fromkeys([left + self._changed, *behind[: PLACES - 2]]), left]
