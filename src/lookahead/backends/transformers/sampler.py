"""A text as transformers' processors and criteria see it, and the sampler of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processing

from lookahead.backends.machine import upload
from lookahead.backends.transformers.early_sampling import Foreseen, sample_early, selected
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.core.forest import Forest
from lookahead.core.protocols import Drafter
from lookahead.core.results import EarlyTokens
from lookahead.core.sequence import SequenceState, Stop
from lookahead.core.token_tree import Noise


class TextSequence(SequenceState):
    """A `SequenceState` with its text as a tensor.

    Args:
        prompt: The caller's prompt, `[1, tokens]` int64, padding included.
        tokens: Token ids of the prompt without padding. At least one.
        drafter: Proposes tokens for this sequence only.
        sampler: Selects the tokens.
        stop: Stop rule.
        last_length: Largest length of `ids` for the model's positions; unlimited if `None`.
        **options: Arguments of `SequenceState`.

    Attributes:
        device: Device of `ids`.
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
        self._padding = prompt.shape[1] - len(self.tokens)
        self.device = prompt.device
        self._ids = prompt
        self._written = prompt.shape[1]
        self._here = np.empty(0, dtype=np.int32)
        self._copied = 0

    @property
    def length(self) -> int:
        """Tokens of the text, padding included."""
        return len(self.tokens) + self._padding

    @property
    def ids(self) -> torch.Tensor:
        """Text so far with its padding, `[1, tokens]` int64; a view, valid until the next token."""
        if self._written < self.length:  # on demand: most calls need it only at the end
            if self.length > self._ids.shape[1]:
                capacity = self._ids.new_empty((1, self.length + 256))
                self._ids = torch.cat([self._ids[:, : self._written], capacity], dim=1)
            new = self.tokens[self._written - self.length :]
            self._ids[0, self._written : self.length] = upload(self._ids.device, np.array(new))[0]
            self._written = self.length
        return self._ids[:, : self._written]

    @ids.setter
    def ids(self, ids: torch.Tensor) -> None:
        self._ids, self._written = ids, ids.shape[1]

    @property
    def on_host(self) -> NDArray[np.int32]:
        """Text so far without padding, `[tokens]`; a view, valid until the next token."""
        count = len(self.tokens)
        if count > len(self._here):
            self._here = np.resize(self._here, count + 256)
        self._here[self._copied : count] = self.tokens[self._copied :]
        self._copied = count
        return self._here[:count]


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits processor: maps a text `[1, tokens]` and scores `[1, vocabulary]` to scores."""

IGNORE_TEXT = (
    *(processing.TemperatureLogitsWarper, processing.TopKLogitsWarper, processing.TopPLogitsWarper),
    *(processing.MinPLogitsWarper, processing.TypicalLogitsWarper, processing.EpsilonLogitsWarper),
    *(processing.EtaLogitsWarper, processing.LogitNormalization, processing.InfNanRemoveLogitsProcessor),
    processing.SuppressTokensLogitsProcessor,
)
"""Processors that treat each row of scores separately, and ignore the text."""

_READ_TOKENS = (processing.RepetitionPenaltyLogitsProcessor,)
"""Processors that use the tokens of the text, and not their order and number."""

_PURE = (
    *IGNORE_TEXT,
    *_READ_TOKENS,
    processing.NoRepeatNGramLogitsProcessor,
    *(processing.MinLengthLogitsProcessor, processing.MinNewTokensLengthLogitsProcessor),
    *(processing.SequenceBiasLogitsProcessor, processing.NoBadWordsLogitsProcessor),
    *(processing.ForcedBOSTokenLogitsProcessor, processing.ForcedEOSTokenLogitsProcessor),
    *(processing.SuppressTokensAtBeginLogitsProcessor, processing.ExponentialDecayLengthPenalty),
)
"""Processors of transformers whose scores depend only on the text and the logits."""


class TextSampler:
    """Selects the next token from the logits after a node, as plain decoding does.

    Processors run only at nodes of the walked path, with the exact text before the token. Processors that depend on the
    text (repetition penalty, minimal length, ...) are therefore exact.

    Args:
        processor: Processor of the logits.
        noise: Noise for sampling as `torch.multinomial` does; greedy selection if not given.
        row: Row of the noise.
        keep_logits: Whether to collect the raw logits of each token in `logits`, `[1, vocabulary]` float32 each.
        keep_scores: Whether to collect the processed scores of each token in `scores`, `[1, vocabulary]` float32 each.
        selector: Selects tokens instead, with functions of the model's engine; see `Session.selector`.

    Attributes:
        needs_logits: Whether selection needs more than the likeliest token of the raw logits.
        records: Whether something is recorded with each token, so that `select` must be called for it.
        ignores_text: Whether no processor uses the text.
        alike: Key of the processors if they use at most the tokens of the text, in any order and number; texts with
            equal keys are sampled together. Else empty.
        foreseen: Tokens that were selected before the walk.
        like: A row of probabilities, `[1, vocabulary]`; `None` before the first sampled token.
    """

    def __init__(
        self,
        processor: Processor | None = None,
        noise: SamplingNoise | None = None,
        row: int = 0,
        keep_logits: bool = False,
        keep_scores: bool = False,
        selector: Any = None,
    ) -> None:
        self._processors = _listed(processor)
        kinds = set(map(type, self._processors))
        self.ignores_text = kinds <= {*IGNORE_TEXT}
        self.alike = repr(_setting(self._processors)) if kinds <= {*IGNORE_TEXT, *_READ_TOKENS} else ""
        self._noise = noise
        self._row = row
        self._selector = selector
        self.like: torch.Tensor | None = None
        self.foreseen: Foreseen | None = None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.records = keep_logits or keep_scores
        self.needs_logits = self.selects or self.records or selector is not None

    @cached_property
    def _temperature(self) -> float:
        warpers = [member for member in self._processors if isinstance(member, processing.TemperatureLogitsWarper)]
        return float(warpers[0].temperature) if warpers else 1.0

    @cached_property
    def is_pure(self) -> bool:
        """Whether processors are transformers' own, with scores that depend only on the text and the logits."""
        return all(type(member) in _PURE for member in self._processors)

    @cached_property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self._noise is not None

    @cached_property
    def selects(self) -> bool:
        """Whether tokens may differ from the likeliest ones of the raw logits."""
        return self.samples or bool(self._processors)

    def foresee(self, tokens: int) -> Noise | None:
        """Return the noise of the next `tokens` tokens, if it is on the host."""
        if self._noise is None or self.like is None or self.like.device.type != "cpu":
            return None
        if not self._noise.can_foresee(tokens, self.like):
            return None
        values = [noise[0].float().numpy() for noise in self._noise.look_ahead(self._row, tokens, self.like)]
        return Noise(values, self._temperature)

    @classmethod
    def look_ahead_rows(
        cls, rows: Sequence[tuple[TextSequence, int]], forest: Forest, outputs: Any
    ) -> list[EarlyTokens]:
        """See `Sampler`."""
        return sample_early(rows, forest, outputs)

    def look_ahead(self, tokens: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the noise of the next `tokens` tokens, `[1, vocabulary]` each; see `SamplingNoise.look_ahead`."""
        return [] if self._noise is None else self._noise.look_ahead(self._row, tokens, like)

    def is_alike_together(self, vocabulary: int) -> bool:
        """Return whether distributions of several rows have the bits of single rows; tried once for each setting."""
        key = self.alike, vocabulary
        if key not in _TRIED:
            random = torch.Generator().manual_seed(0)
            logits = 4 * torch.randn((5, vocabulary), generator=random, dtype=torch.float32, device="cpu")
            parts = (logits, *(logits[row : row + 1] for row in range(len(logits))))
            together, *single = (torch.nn.functional.softmax(self.process(None, rows), dim=-1) for rows in parts)
            while len(_TRIED) >= _MAX_TRIED:
                _TRIED.pop(next(iter(_TRIED)), None)
            _TRIED[key] = torch.equal(together, torch.cat(single))
        return _TRIED[key]

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        if self._selector is not None:
            token = int(self._selector.select(sequence, outputs, node))
            if self.records:
                self.keep(outputs.logits_after(node), self._selector.scores)
            return token
        foreseen = self.foreseen
        if foreseen is not None and node in foreseen.nodes:
            index = foreseen.nodes.index(node)
            token = int(foreseen.read()[foreseen.first + index])
            if token >= 0:
                row = foreseen.row + index
                if self._noise is not None:
                    self._noise.take(self._row, foreseen.probabilities[row : row + 1])
                if self.records:
                    self.keep(outputs.logits_after(node), foreseen.scores[row : row + 1])
                return token
        text = None if self.ignores_text else sequence.ids  # `ids` copies new tokens
        return self.choose(text, outputs.logits_after(node).to(sequence.device))

    def advance(self, tokens: int) -> None:
        """Advance over tokens that were selected by `look_ahead_rows`."""
        if self._noise is not None and self.like is not None:
            self._noise.advance(self._row, tokens, self.like)

    def choose(self, text: torch.Tensor | None, logits: torch.Tensor) -> int:
        """Select the token after `text` `[1, tokens]` from `logits` `[1, vocabulary]` float32.

        `text` may be `None` if all processors ignore it.
        """
        scores = self.process(text, logits)
        self.keep(logits, scores)
        return int(scores.argmax(dim=-1)) if self._noise is None else self._sample(scores, self._noise)

    def keep(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Collect the logits and scores of a token, if requested."""
        for collected, values in ((self.logits, logits), (self.scores, scores)):
            if collected is not None:
                collected.append(values.clone())

    def process(self, text: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores: the output of the processors; `logits` stay unchanged."""
        scores = logits if self.ignores_text else logits.clone()  # other processors may write into it
        for one in self._processors:  # transformers' list inspects each signature
            scores = one(text, scores)
        return scores

    def _sample(self, scores: torch.Tensor, noise: SamplingNoise) -> int:
        """Select a token from the softmax of `scores` as `torch.multinomial` does, by the noise of this index."""
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        self.like = probabilities
        drawn = noise.take(self._row, probabilities)
        is_usual = scores.device.type == "cpu" and scores.dtype == torch.float32
        token = int((_selected_here if is_usual else selected)(probabilities, drawn))  # waits for the device
        if token < 0:
            token = int(torch.multinomial(probabilities, num_samples=1))  # raises its error
        return token


_TRIED: dict[object, bool] = {}
"""Results of `TextSampler.is_alike_together` by processors and vocabulary."""

_MAX_TRIED = 256
"""Largest number of cached results."""


def _setting(processors: Sequence[Any]) -> list[object]:
    """Return classes and settings of processors, as a key."""
    setting: list[object] = []
    for one in processors:
        setting.append(type(one))
        for name, value in vars(one).items():
            setting.append((name, value.tolist() if isinstance(value, torch.Tensor) else value))
    return setting


def _selected_here(probabilities: torch.Tensor, noise: torch.Tensor) -> int:
    """Return `selected` for one row on the CPU, five times as fast."""
    token = int((probabilities / noise).numpy()[0].argmax())
    return -1 if isnan(probabilities[0, token]) else token


def _listed(processor: Processor | None) -> list[Any]:
    """Return the members of a processor."""
    if processor is None:
        return []
    return list(processor) if isinstance(processor, LogitsProcessorList) else [processor]
