"""Predicted text: drafts from a text that the user expects, such as a file that is to be edited."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core.protocols import StepResult
from lookahead.drafting.auto.sources import TokenPaths

NEARBY = 64
"""Tokens that are proposed of the predicted text, and how far ahead a place is looked for where the text goes on after
a change."""

PLACES = 4
"""Most places where the text may go on."""


class PredictedText:
    """A source (`Source`) of what follows in a text that is expected.

    While the output follows the predicted text there is one place where it goes on. After another token there are
    several: the token stands for one of the predicted text, or between two of them, or some were left out. The first
    of these places that comes true is the one to go on from.

    Args:
        tokens: Token ids of the predicted text.

    Attributes:
        tokens: As given.
        accepted: Tokens of the output that were where the predicted text had them.
    """

    name = "predicted text"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._places = [0]
        self._changed = 0  # tokens since the output left the predicted text
        self.accepted = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence: its output is expected to be the predicted text."""
        self._places, self._changed, self.accepted = [0], 0, 0

    def propose(self) -> TokenPaths:
        """See `Source`."""
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
        """Follow the text."""
        for token in result.tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        for place in self._places:
            if place < len(self.tokens) and self.tokens[place] == token:
                self._places, self._changed = [place + 1], 0
                self.accepted += 1
                return
        self._changed += 1
        left = self._places[-1]  # where the output left the predicted text
        behind = [
            place + 1
            for place in range(left, min(left + NEARBY, len(self.tokens)))
            if self.tokens[place] == token and place != left
        ]
        self._places = [*dict.fromkeys([left + self._changed, *behind[: PLACES - 2]]), left]
