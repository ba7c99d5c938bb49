"""A sequence as transformers' processors and criteria see it: a tensor of token ids, padding included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead.backends.transfers import upload
from lookahead.core.protocols import Drafter
from lookahead.core.sequence import SequenceState, Stop

if TYPE_CHECKING:
    from lookahead.backends.transformers.sampler import TextSampler


class TextSequence(SequenceState):
    """A `SequenceState` with its text as a tensor.

    Args:
        prompt: The prompt as the caller gave it, `[1, tokens]` int64, padding included.
        tokens: The token ids of the prompt that the model reads: `prompt` without padding. At least one.
        drafter: Proposes tokens for this sequence alone.
        sampler: Selects the tokens.
        stop: Ends the text.
        last_length: Length of `ids` at which the model can read no further token, if there is one.
        **options: As for `SequenceState`.

    Attributes:
        length: Tokens of the text, padding included.
        device: Where `ids` are.
    """

    sampler: TextSampler

    def __init__(
        self,
        prompt: torch.Tensor,
        tokens: Sequence[int],
        drafter: Drafter,
        sampler: TextSampler,
        stop: Stop,
        last_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokens, drafter, sampler, stop, **options)
        self.last_length = last_length
        self.length = prompt.shape[1]
        self.device = prompt.device
        self._ids = prompt
        self._written = self.length

    @property
    def ids(self) -> torch.Tensor:
        """The text so far with its padding, `[1, tokens]` int64; a view, valid until the next token."""
        if self._written < self.length:  # not for each token: most calls ask only in the end
            if self.length > self._ids.shape[1]:
                room = self._ids.new_empty((1, self.length + 256))
                self._ids = torch.cat([self._ids[:, : self._written], room], dim=1)
            new = self.tokens[self._written - self.length :]
            self._ids[0, self._written : self.length] = upload(self._ids.device, np.array(new))[0]
            self._written = self.length
        return self._ids[:, : self.length]

    def copy_ids(self) -> torch.Tensor:
        """The text so far with its padding, `[1, tokens]` int64, in memory of its own."""
        if self._written == self.length:
            return self._ids[:, : self.length].clone()
        (new,) = upload(self.device, np.array([self.tokens[self._written - self.length :]]))
        return torch.cat([self._ids[:, : self._written], new], dim=1)

    def append(self, token: int) -> bool:
        """Add a token to the text; whether the text is complete with it."""
        self.length += 1
        return super().append(token)
