"""Selects tokens as transformers' `generate` does: processors, then the likeliest token or a sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lookahead.backends.transformers.noise import RowNoise
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.core.protocols import NodeOutputs

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Changes scores `[1, vocabulary]` given the text `[1, tokens]`, as transformers' logits processors do."""


class TextSampler:
    """Selects the next token as plain decoding would, from the logits after a node.

    Processors run only at nodes on the walked path, with the exact text before the token, so those that look
    at the text (repetition penalty, minimal length, ...) are exact.

    Args:
        processor: Applied to the logits first, if given.
        noise: Samples the token from the scores' softmax, as `torch.multinomial` does; the likeliest one if not given.
        keep_logits: Collect the raw logits of each token in `logits`, `[1, vocabulary]` float32 each.
        keep_scores: Collect the processed scores of each token in `scores`, likewise.
    """

    def __init__(
        self,
        processor: Processor | None = None,
        noise: RowNoise | None = None,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self._processor = processor
        self._noise = noise
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self._noise is not None

    @property
    def needs_logits(self) -> bool:
        """Whether more is wanted than the likeliest token of the raw logits."""
        return self._processor is not None or self.samples or self.keeps

    @property
    def keeps(self) -> bool:
        """Whether raw logits or processed scores are collected."""
        return self.logits is not None or self.scores is not None

    def select(self, sequence: TextSequence, outputs: NodeOutputs, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        text = None if self._processor is None else sequence.ids
        return self.choose(text, outputs.logits_after(node).to(sequence.device))

    def choose(self, text: torch.Tensor | None, logits: torch.Tensor) -> int:
        """The token after `text` `[1, tokens]`, given its `logits` `[1, vocabulary]` float32.

        The text may be left out where there is no processor that looks at it.
        """
        if self.logits is not None:
            self.logits.append(logits.clone())
        # processors may write into what they get
        scores = logits
        if self._processor is not None:
            assert text is not None
            scores = self._processor(text, logits.clone())
        if self.scores is not None:
            self.scores.append(scores.clone())
        return int(scores.argmax(dim=-1)) if self._noise is None else self._sample(scores, self._noise)

    @staticmethod
    def _sample(scores: torch.Tensor, noise: RowNoise) -> int:
        """What `torch.multinomial` selects of the softmax of `scores`, with the noise of this place."""
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        token = int((probabilities / noise.take(probabilities)).argmax(dim=-1))
        if math.isnan(probabilities[0, token]):
            torch.multinomial(probabilities, num_samples=1)  # which refuses them
        return token
