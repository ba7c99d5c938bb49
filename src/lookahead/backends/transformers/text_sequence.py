"""A sequence as transformers' processors and criteria see it: a tensor of token ids, padding included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lookahead.core.drafter import Drafter
from lookahead.core.sequence import SequenceState

if TYPE_CHECKING:
    from lookahead.backends.transformers.sampler import TextSampler


class TextSequence(SequenceState):
    """A `SequenceState` with its text as a tensor.

    Args:
        prompt: The prompt as the caller gave it, `[1, tokens]` int64, padding included.
        tokens: The token ids of the prompt that the model reads: `prompt` without padding. At least one.
        drafter: Proposes tokens for this sequence alone.
        sampler: Selects the tokens.
        last_length: Length of `ids` at which the model can read no further token, if there is one.
    """

    sampler: TextSampler

    def __init__(
        self,
        prompt: torch.Tensor,
        tokens: Sequence[int],
        drafter: Drafter,
        sampler: TextSampler,
        last_length: int | None = None,
    ) -> None:
        super().__init__(tokens, drafter, sampler)
        self.last_length = last_length
        self._length = prompt.shape[1]
        self._ids = prompt

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
        super().append(token)
