"""Selection of tokens as mlx-lm does it: logits processors, log-probabilities, a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

Processor = Callable[[Any, Any], Any]
"""Maps tokens `[tokens]` and logits `[1, vocabulary]` to logits, as `make_logits_processors` of mlx-lm makes them."""


class MLXSampler:
    """Selects the token after a node with mlx-lm's functions, in the order of the text.

    Each token takes its random numbers from `mx.random` once. So a seed gives the tokens of mlx-lm's own decoding.

    Args:
        sampler: Maps log-probabilities `[1, vocabulary]` to tokens `[1]`; the likeliest token if `None`.
        processors: Logits processors.

    Attributes:
        logprobs: Log-probabilities of each token selected in this step, `[vocabulary]`.
        states: State of `mx.random` after each of them.
    """

    samples = False  # its noise is not foreseen
    needs_logits = True

    def __init__(self, sampler: Callable[[Any], Any] | None, processors: Sequence[Processor] = ()) -> None:
        self._sampler = sampler
        self._processors = processors
        self.logprobs: list[Any] = []
        self.states: list[Any] = []

    def begin_step(self) -> None:
        """Forget the tokens of the last step."""
        self.logprobs, self.states = [], []

    def close(self, surplus: int) -> None:
        """Leave the random state that mlx-lm leaves: it samples one token more than it yields.

        Args:
            surplus: Number of tokens that were selected and not yielded.
        """
        if self._sampler is None or not self.states:
            return
        if surplus:
            high, low = self.states[len(self.states) - surplus].tolist()
            mx.random.seed(high << 32 | low)
        else:
            mx.eval(self._sampler(self.logprobs[-1][None]))

    def foresee(self, tokens: int) -> None:
        """Return `None`: nothing of `mx.random` is drawn in advance."""

    @classmethod
    def look_ahead_rows(cls, rows: Any, forest: Any, outputs: Any) -> list[Any]:
        """Return no tokens: nothing is sampled before the walk."""
        return []

    def advance(self, tokens: int) -> None:
        """See `Sampler`; `look_ahead_rows` selects nothing."""

    def select(self, sequence: Any, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        row = int(outputs.logit_rows[node])
        if self._sampler is None and not self._processors:
            self.logprobs.append(outputs.whole.logprobs[row])
            return int(outputs.predictions[node])
        token, logprobs = self.choose(sequence.tokens, outputs.whole.raw[row : row + 1])
        self.logprobs.append(logprobs)
        self.states.append(mx.array(mx.random.state[0]))
        return token

    def choose(self, tokens: Sequence[int], logits: Any) -> tuple[int, Any]:
        """Select the token after `tokens` from `logits` `[1, vocabulary]`; return it and the log-probabilities."""
        for processor in self._processors:
            logits = processor(mx.array(tokens), logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        selected = mx.argmax(logprobs, axis=-1) if self._sampler is None else self._sampler(logprobs)
        return int(selected.item()), logprobs.squeeze(0)
