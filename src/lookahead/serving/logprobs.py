"""Log-probabilities of the tokens of a text, for a request that wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.core.outputs import NodeOutputs


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model thought a token, before processors and sampling settings.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        top: The likeliest tokens in its place with theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobSampler:
    """A sampler that notes the log-probabilities of what another one selects.

    Args:
        sampler: The other one.
        top: How many of the likeliest tokens to note each time.

    Attributes:
        noted: One for each token that was selected.
    """

    needs_logits = True

    def __init__(self, sampler: TextSampler, top: int) -> None:
        self._sampler = sampler
        self._top = top
        self.noted: list[TokenLogprobs] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def select(self, sequence: TextSequence, outputs: NodeOutputs, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        token = self._sampler.select(sequence, outputs, node)
        logits: torch.Tensor = outputs.logits_after(node)[0]
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self._top, len(logprobs))) if self._top else (logprobs[:0], logprobs[:0])
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.noted.append(TokenLogprobs(float(logprobs[token]), top))
        return token
