"""Logits processors of a request, which run on the walked path alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LogitsProcessor


class OccurrencePenalty(LogitsProcessor):  # type: ignore[misc]
    """`presence_penalty` and `frequency_penalty` of OpenAI's API, by the tokens of the answer so far.

    Args:
        presence: Subtracted from the logit of each token that is in the answer.
        frequency: Subtracted for each time that it is.
        prompt_length: Tokens before the answer.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency = presence, frequency
        self._seen = prompt_length
        self._counts: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]` less the penalties of tokens that the answer has."""
        if self._counts is None:
            self._counts = torch.zeros_like(scores[0])
        new = input_ids[0, self._seen :]
        self._counts.index_add_(0, new, torch.ones_like(new, dtype=self._counts.dtype))
        self._seen = input_ids.shape[1]
        return scores - self._frequency * self._counts - self._presence * (self._counts > 0)


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """Adds a number to the logits of some tokens.

    Args:
        bias: The number for each token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.long)
        self._values = torch.tensor(list(bias.values()))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]` with the bias added."""
        biased = scores.clone()
        biased[0, self._tokens.to(scores.device)] += self._values.to(scores.device, scores.dtype)
        return biased
