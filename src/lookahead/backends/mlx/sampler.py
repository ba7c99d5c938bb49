"""Selection of tokens as mlx-lm does it: logits processors, log-probabilities, a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.sample_utils import make_logits_processors, make_repetition_penalty, make_sampler
from transformers.generation import logits_process as processing

Processor = Callable[[Any, Any], Any]
"""Maps a text (`SequenceState`) and logits `[1, vocabulary]` to logits."""

_SETTINGS = {
    processing.TemperatureLogitsWarper: ("temperature", "temp"),
    processing.TopPLogitsWarper: ("top_p", "top_p"),
    processing.MinPLogitsWarper: ("min_p", "min_p"),
    processing.TopKLogitsWarper: ("top_k", "top_k"),
}
"""Settings of `make_sampler`, which applies them in an order of its own, by classes of transformers."""

_OTHER_SETTINGS = (
    *(processing.TypicalLogitsWarper, processing.EpsilonLogitsWarper, processing.EtaLogitsWarper),
    processing.TopHLogitsWarper,
)
"""Classes that mlx-lm does not have. Their order matters, so with them all settings are transformers'."""

_MIN_TOP_P = 1e-9  # only the likeliest token; mlx-lm reads 0 as no limit
_WHOLE_TEXT = 2**30


class MLXSelector:
    """Selects the token after a node with mlx-lm's functions, in the order of the text.

    Each token takes its random numbers from `mx.random` once. So a seed gives the tokens of mlx-lm's own decoding.

    Args:
        sampler: Maps log-probabilities `[1, vocabulary]` to tokens `[1]`; the likeliest token if `None`.
        processors: Logits processors.
        seed: Seed of a random state for this text; by default the state of `mx.random`.

    Attributes:
        logprobs: Log-probabilities of the last token, `[vocabulary]`.
    """

    def __init__(
        self, sampler: Callable[[Any], Any] | None, processors: Sequence[Processor] = (), seed: int | None = None
    ) -> None:
        self._sampler = sampler
        self._processors = processors
        self._state = None if seed is None else mx.random.key(seed % 2**64)
        self.logprobs: Any = None

    @property
    def scores(self) -> torch.Tensor:
        """Log-probabilities of the last token, `[1, vocabulary]` float32."""
        return _to_torch(self.logprobs[None])

    def select(self, sequence: Any, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        row = int(outputs.logit_rows[node])
        if self._sampler is None and not self._processors:
            self.logprobs = outputs.whole.native[1][row]
            return int(outputs.predictions[node])
        logits = outputs.whole.native[0][row : row + 1]
        for processor in self._processors:
            logits = processor(sequence, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        self.logprobs = logprobs.squeeze(0)
        if self._sampler is None:
            return int(mx.argmax(logprobs, axis=-1).item())
        if self._state is None:
            return int(self._sampler(logprobs).item())
        before = random_state()
        try:
            set_random_state(self._state)
            token = int(self._sampler(logprobs).item())
            self._state = random_state()
        finally:
            set_random_state(before)
        return token


def random_state() -> Any:
    """Return the random state of the calling thread."""
    return mx.array(mx.random.state[0])


def set_random_state(state: Any) -> None:
    """Set the random state of the calling thread."""
    high, low = state.tolist()
    mx.random.seed(high << 32 | low)


def selector_of(processors: Sequence[Any], samples: bool, seed: int | None, vocabulary: int) -> MLXSelector | None:
    """Return a selector with transformers' settings; `None` for the likeliest token without settings.

    mlx-lm's functions replace processors of transformers that do the same. The others run in float32.

    Args:
        processors: Logits processors of transformers.
        samples: Whether tokens are sampled.
        seed: See `MLXSelector`.
        vocabulary: Number of token ids.
    """
    if not samples and not processors:
        return None
    settings: dict[str, Any] = {"temp": 1.0}
    own = not any(isinstance(one, _OTHER_SETTINGS) for one in processors)
    further = []
    for one in processors:
        name, argument = _SETTINGS.get(type(one), ("", ""))
        if name and own:
            settings[argument] = getattr(one, name)
        else:
            further.append(_processor_of(one, vocabulary))
    if settings.get("top_k", 0) >= vocabulary:
        del settings["top_k"]
    if "top_p" in settings:
        settings["top_p"] = max(settings["top_p"], _MIN_TOP_P)
    return MLXSelector(make_sampler(**settings) if samples else None, further, seed)


def _processor_of(one: Any, vocabulary: int) -> Processor:
    """Return mlx-lm's function that does what a processor of transformers does, or a wrapper of it."""
    if type(one) is processing.RepetitionPenaltyLogitsProcessor:
        penalty = make_repetition_penalty(one.penalty, _WHOLE_TEXT)
        ignored = int(getattr(one, "prompt_ignore_length", None) or 0)  # padding included
        return lambda text, logits: penalty(mx.array(text.tokens[max(ignored - _padding(text), 0) :]), logits)
    if type(one) is processing.SequenceBiasLogitsProcessor:
        biases = dict(one.sequence_bias)
        if all(len(ids) == 1 and ids[0] < vocabulary for ids in biases):
            (add,) = make_logits_processors(logit_bias={ids[0]: value for ids, value in biases.items()})
            return lambda text, logits: add(None, logits)
    return lambda text, logits: mx.array(one(text.ids, _to_torch(logits)).numpy()).astype(logits.dtype)


def _padding(text: Any) -> int:
    return int(text.length) - len(text.tokens)


def _to_torch(logits: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(logits.astype(mx.float32)))
