"""One sequence that is being decoded."""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence

import torch

from lookahead.drafting import Drafter
from lookahead.verification import Target


class Sequence:
    """The text of one sequence, and who drafts and decides for it.

    Args:
        prompt: The prompt as the caller gave it, `[1, tokens]` int64, padding included.
        tokens: The token ids of the prompt that the model reads: `prompt` without padding. At least one.
        drafter: Proposes tokens for this sequence alone.
        target: Names the tokens.
        last_length: Length of `ids` at which the model can read no further token, if there is one.

    Attributes:
        tokens: Token ids of the text so far, without padding.
        finished: Whether the text is complete.
        undecided: Whether the last step put its decision off to a step without a draft.
        steps: Steps this sequence has taken.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        tokens: TokenSequence[int],
        drafter: Drafter,
        target: Target,
        last_length: int | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.drafter = drafter
        self.target = target
        self.last_length = last_length
        self.finished = False
        self.undecided = False
        self.steps = 0
        self._length = prompt.shape[1]
        self._ids = prompt
        drafter.start(self.tokens)

    @property
    def ids(self) -> torch.Tensor:
        """The text so far with its padding, `[1, tokens]` int64; a view, valid until the next token."""
        return self._ids[:, : self._length]

    def append(self, token: int) -> None:
        """Add a token to the text."""
        if self._length == self._ids.shape[1]:
            room = self._ids.new_empty((1, self._length + 256))
            self._ids = torch.cat([self._ids, room], dim=1)
        self._ids[0, self._length] = token
        self._length += 1
        self.tokens.append(token)
