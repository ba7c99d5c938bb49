"""A text as transformers' processors and criteria see it, and who selects its tokens as `generate` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processing

from lookahead.backends.machine import Read, upload
from lookahead.backends.transformers.noise import MOST_BYTES, SamplingNoise
from lookahead.core.protocols import Drafter
from lookahead.core.sequence import SequenceState, Stop
from lookahead.core.token_tree import NodeKind, Noise, TokenTree


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

    def append(self, token: int) -> bool:
        """Add a token to the text; whether the text is complete with it."""
        self.length += 1
        return super().append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, whose end somebody else has looked for."""
        self.length += len(tokens)
        super().extend(tokens)


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Changes scores `[1, vocabulary]` given the text `[1, tokens]`, as transformers' logits processors do."""

IGNORE_TEXT = (
    *(processing.TemperatureLogitsWarper, processing.TopKLogitsWarper, processing.TopPLogitsWarper),
    *(processing.MinPLogitsWarper, processing.TypicalLogitsWarper, processing.EpsilonLogitsWarper),
    *(processing.EtaLogitsWarper, processing.LogitNormalization, processing.InfNanRemoveLogitsProcessor),
    processing.SuppressTokensLogitsProcessor,
)
"""Processors that treat each row of scores by itself, and do not look at the text."""


class _Foreseen(NamedTuple):
    """What was sampled after the nodes of a step.

    Attributes:
        places: Where each node is in the rest.
        read: Gives the tokens, `[nodes]`; -1 where probabilities are not numbers.
        scores, probabilities: `[nodes, vocabulary]`.
    """

    places: dict[int, int]
    read: Read
    scores: torch.Tensor
    probabilities: torch.Tensor


class TextSampler:
    """Selects the next token as plain decoding would, from the logits after a node.

    Processors run only at nodes on the walked path, with the exact text before the token, so those that look
    at the text (repetition penalty, minimal length, ...) are exact.

    Args:
        processor: Applied to the logits first, if given.
        noise: Samples the token from the scores' softmax, as `torch.multinomial` does; the likeliest one if not given.
        row: Which row of the noise it takes.
        keep_logits: Collect the raw logits of each token in `logits`, `[1, vocabulary]` float32 each.
        keep_scores: Collect the processed scores of each token in `scores`, likewise.
    """

    def __init__(
        self,
        processor: Processor | None = None,
        noise: SamplingNoise | None = None,
        row: int = 0,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self._processors = _listed(processor)
        self._ignores_text = all(type(member) in IGNORE_TEXT for member in self._processors)
        warpers = [member for member in self._processors if isinstance(member, processing.TemperatureLogitsWarper)]
        self._temperature = float(warpers[0].temperature) if warpers else 1.0
        self._noise, self._row = noise, row
        self._like: torch.Tensor | None = None  # the probabilities that were sampled from last
        self._foreseen: _Foreseen | None = None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self._noise is not None

    @property
    def needs_logits(self) -> bool:
        """Whether more is wanted than the likeliest token of the raw logits."""
        return bool(self._processors) or self.samples or self.keeps

    @property
    def keeps(self) -> bool:
        """Whether raw logits or processed scores are collected."""
        return self.logits is not None or self.scores is not None

    def foresee(self, tokens: int) -> Noise | None:
        """The noise of so many tokens to come, where the host has it."""
        if self._noise is None or self._like is None or self._like.device.type != "cpu":
            return None  # nothing is drawn, or not yet, or where the host would have to wait for it
        if not self._noise.can_foresee(tokens, self._like):
            return None
        places = [noise[0].float().numpy() for noise in self._noise.look_ahead(self._row, tokens, self._like)]
        return Noise(places, self._temperature)

    def look_ahead(self, sequence: TextSequence, tree: TokenTree, outputs: Any) -> None:
        """Begin to sample after all nodes that the walk may come to, where the host would have to wait for each.
        `outputs` is a `TreeResult`.

        Each place has its noise, whatever comes before it, so that the token after a node depends on its depth and its
        logits alone, unless a processor looks at the text. On CUDA each row of a softmax is summed by itself, in an
        order that depends on the size of the vocabulary alone; of the running sums of top-p even those of a single row
        are not always the same there.
        """
        self._foreseen = None
        device = sequence.device
        if self._noise is None or not self._ignores_text or device.type != "cuda" or outputs.logits.device != device:
            return
        top = tree.depths[tree.root]
        below, logit_rows = range(tree.root, len(tree)), outputs.logit_rows.tolist()
        nodes = [node for node in below if logit_rows[node] >= 0 and tree.kinds[node] is not NodeKind.WINDOW]
        # What is left out is selected when the walk comes to it.
        nodes = nodes[: max(MOST_BYTES // (4 * outputs.logits.shape[-1]), 1)]
        like = outputs.logits.new_empty((1, outputs.logits.shape[-1]), dtype=torch.float32)
        noise = self._noise.look_ahead(self._row, 1 + max(tree.depths[node] for node in nodes) - top, like)
        nodes = [node for node in nodes if tree.depths[node] - top < len(noise)]
        if not nodes:
            return
        rows, depths = [logit_rows[node] for node in nodes], [tree.depths[node] - top for node in nodes]
        places = upload(device, np.array([rows, depths]))[0]
        scores = outputs.logits.index_select(0, places[0]).float()
        scores = self._process(None, scores)
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        # What is not a number is left to `_sample`, which refuses it.
        tokens = _selected(probabilities, torch.cat(noise).index_select(0, places[1]))
        read = outputs.downloads.add(tokens.int())
        self._foreseen = _Foreseen({node: place for place, node in enumerate(nodes)}, read, scores, probabilities)

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        place = None if self._foreseen is None else self._foreseen.places.get(node)
        if self._foreseen is not None and place is not None:
            token = int(self._foreseen.read()[place])
            if token >= 0:
                assert self._noise is not None
                self._noise.take(self._row, self._foreseen.probabilities[place : place + 1])
                if self.keeps:
                    self.keep(outputs.logits_after(node), self._foreseen.scores[place : place + 1])
                return token
        text = None if self._ignores_text else sequence.ids  # which are put together when they are asked for
        return self.choose(text, outputs.logits_after(node).to(sequence.device))

    def choose(self, text: torch.Tensor | None, logits: torch.Tensor) -> int:
        """The token after `text` `[1, tokens]`, given its `logits` `[1, vocabulary]` float32.

        The text may be left out where there is no processor that looks at it.
        """
        scores = self._process(text, logits)
        self.keep(logits, scores)
        return int(scores.argmax(dim=-1)) if self._noise is None else self._sample(scores, self._noise)

    def keep(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Collect what is wanted of a token."""
        for collected, values in ((self.logits, logits), (self.scores, scores)):
            if collected is not None:
                collected.append(values.clone())

    def _process(self, text: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """What the processors make of `logits`, which stay as they are."""
        scores = logits if self._ignores_text else logits.clone()  # which those that look at the text may write into
        for one in self._processors:  # without a look at the signature of each, as in transformers' list
            scores = one(text, scores)
        return scores

    def _sample(self, scores: torch.Tensor, noise: SamplingNoise) -> int:
        """What `torch.multinomial` selects of the softmax of `scores`, with the noise of this place."""
        self._like = probabilities = torch.nn.functional.softmax(scores, dim=-1)
        drawn = noise.take(self._row, probabilities)
        is_usual = scores.device.type == "cpu" and scores.dtype == torch.float32
        selected = int((_selected_here if is_usual else _selected)(probabilities, drawn))  # the host waits for it
        if selected < 0:
            selected = int(torch.multinomial(probabilities, num_samples=1))  # which refuses it
        return selected


def _selected(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """What `torch.multinomial` selects of each row with its noise, `[rows]`; -1 where probabilities are no numbers."""
    selected = (probabilities / noise).argmax(dim=-1)
    return selected.masked_fill(probabilities.gather(1, selected[:, None])[:, 0].isnan(), -1)


def _selected_here(probabilities: torch.Tensor, noise: torch.Tensor) -> int:
    """Likewise of one row on the CPU, in a fifth of the time that torch takes."""
    selected = int((probabilities / noise).numpy()[0].argmax())
    return -1 if isnan(probabilities[0, selected]) else selected


def _listed(processor: Processor | None) -> list[Any]:
    """The processors that one may consist of."""
    if processor is None:
        return []
    return list(processor) if isinstance(processor, LogitsProcessorList) else [processor]
