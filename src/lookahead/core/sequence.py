"""One sequence that is being decoded."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core.drafter import Drafter
from lookahead.core.sampler import Sampler


class SequenceState:
    """The text of one sequence, and who drafts and selects its tokens.

    Args:
        tokens: The token ids of the prompt that the model reads. At least one.
        drafter: Proposes tokens for this sequence alone.
        sampler: Selects the tokens.

    Attributes:
        tokens: Token ids of the text so far.
        finished: Whether the text is complete.
        undecided: Whether the last step put its decision off to a step without a draft.
        steps: Steps this sequence has taken.
    """

    def __init__(self, tokens: Sequence[int], drafter: Drafter, sampler: Sampler) -> None:
        self.tokens = list(tokens)
        self.drafter = drafter
        self.sampler = sampler
        self.finished = False
        self.undecided = False
        self.steps = 0
        drafter.start(self.tokens)

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self.tokens.append(token)
