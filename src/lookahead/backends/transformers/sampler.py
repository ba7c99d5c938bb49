"""A text as transformers' processors and criteria see it, and who selects its tokens as `generate` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processing

from lookahead.backends.machine import Downloads, Read, upload
from lookahead.backends.transformers.noise import MOST_BYTES, SamplingNoise
from lookahead.core.forest import Forest
from lookahead.core.protocols import Drafter
from lookahead.core.sequence import SequenceState, Stop
from lookahead.core.token_tree import NodeKind, Noise, TokenTree


class TextSequence(SequenceState):
    """A `SequenceState` with its text as a tensor.

    Args:
        prompt: The prompt as the caller gave it, `[1, tokens]` int64, padding included.
        tokens: The token ids of the prompt that the model reads: `prompt` without padding. At least one.
        drafter: Proposes tokens for this sequence only.
        sampler: Selects the tokens.
        stop: Ends the text.
        last_length: Maximum length of `ids`: the model can read no further token. `None` for any.
        **options: As for `SequenceState`.

    Attributes:
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
        self._padding = prompt.shape[1] - len(self.tokens)
        self.device = prompt.device
        self._ids = prompt
        self._written = prompt.shape[1]

    @property
    def length(self) -> int:
        """Tokens of the text, padding included."""
        return len(self.tokens) + self._padding

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


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Changes scores `[1, vocabulary]` given the text `[1, tokens]`, as transformers' logits processors do."""

IGNORE_TEXT = (
    *(processing.TemperatureLogitsWarper, processing.TopKLogitsWarper, processing.TopPLogitsWarper),
    *(processing.MinPLogitsWarper, processing.TypicalLogitsWarper, processing.EpsilonLogitsWarper),
    *(processing.EtaLogitsWarper, processing.LogitNormalization, processing.InfNanRemoveLogitsProcessor),
    processing.SuppressTokensLogitsProcessor,
)
"""Processors that treat each row of scores by itself, and do not look at the text."""


class _Ahead(NamedTuple):
    """Nodes of one text, to sample after them together with other texts.

    Attributes:
        sampler: Samples the tokens.
        nodes: Nodes of the tree.
        logit_rows: Row of the logits after each.
        downloads: Copies from the device.
        noise: Noise of the places to come, `[1, vocabulary]` each; empty where it is drawn when a token is selected.
        levels: Index in `noise` for each node.
    """

    sampler: TextSampler
    nodes: list[int]
    logit_rows: list[int]
    downloads: Downloads
    noise: list[torch.Tensor]
    levels: list[int]


class _Foreseen(NamedTuple):
    """Distributions, and perhaps tokens, after the nodes of a step.

    Attributes:
        places: Row of each node in the rest.
        read: Returns the tokens, `[nodes]`, -1 where probabilities are not numbers; `None` if they are not selected.
        scores, probabilities: `[nodes, vocabulary]`.
    """

    places: dict[int, int]
    read: Read | None
    scores: torch.Tensor
    probabilities: torch.Tensor


class TextSampler:
    """Selects the next token as plain decoding would, from the logits after a node.

    Processors run only at nodes on the walked path, with the exact text before the token, so processors that look
    at the text (repetition penalty, minimal length, ...) are exact.

    Args:
        processor: Applied to the logits first, if given.
        noise: Samples the token from the scores' softmax, as `torch.multinomial` does; the likeliest one if not given.
        row: Which row of the noise it takes.
        keep_logits: Collect the raw logits of each token in `logits`, `[1, vocabulary]` float32 each.
        keep_scores: Collect the processed scores of each token in `scores`, `[1, vocabulary]` float32 each.

    Attributes:
        samples: Whether tokens are sampled.
        needs_logits: Whether more is read than the likeliest token of the raw logits.
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
        self.alike = repr(_setting(self._processors)) if self._ignores_text else ""
        warpers = [member for member in self._processors if isinstance(member, processing.TemperatureLogitsWarper)]
        self._temperature = float(warpers[0].temperature) if warpers else 1.0
        self._noise = noise
        self._row = row
        self._like: torch.Tensor | None = None  # the probabilities that were sampled from last
        self._foreseen: _Foreseen | None = None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.samples = noise is not None
        self.needs_logits = bool(self._processors) or self.samples or self.keeps

    @property
    def keeps(self) -> bool:
        """Whether raw logits or processed scores are collected."""
        return self.logits is not None or self.scores is not None

    def foresee(self, tokens: int) -> Noise | None:
        """The noise of the next `tokens` tokens, if the host has it."""
        if self._noise is None or self._like is None or self._like.device.type != "cpu":
            return None  # nothing is drawn, or not yet, or where the host would have to wait for it
        if not self._noise.can_foresee(tokens, self._like):
            return None
        places = [noise[0].float().numpy() for noise in self._noise.look_ahead(self._row, tokens, self._like)]
        return Noise(places, self._temperature)

    @classmethod
    def look_ahead_rows(cls, rows: Sequence[tuple[TextSequence, int]], forest: Forest, outputs: Any) -> None:
        """Begin to sample after nodes that walks may reach, for all texts with equal processors at once.

        Each place has its noise, whatever comes before it, so that the token after a node depends on its depth and its
        logits alone, unless a processor looks at the text. On CUDA, where the host would wait for each token, tokens
        after all nodes are selected. On a CPU the distributions after the roots of several texts are computed, if a
        trial of these processors gave the bits of each row by itself.

        Args:
            rows: Text of each, and its row in the forest.
            forest: The trees.
            outputs: A `TreeResult` for each row.
        """
        groups: dict[object, tuple[torch.Tensor, list[_Ahead]]] = {}
        for sequence, row in rows:
            sampler = sequence.sampler
            result = outputs[row]
            logits = result.logits
            sampler._foreseen = None
            if sampler._noise is None or not sampler._ignores_text or logits.device != sequence.device:
                continue
            ahead = None
            if logits.device.type == "cuda":
                ahead = sampler._all_nodes(forest[row], result)
            elif len(rows) > 1 and logits.device.type == "cpu" and sampler._is_alike_together(logits.shape[-1]):
                root = int(forest.roots[row])
                ahead = _Ahead(sampler, [root], [int(result.logit_rows[root])], result.downloads, [], [])
            if ahead is not None:
                groups.setdefault((sampler.alike, id(logits)), (logits, []))[1].append(ahead)
        for logits, group in groups.values():
            try:
                _sample_ahead(group, logits)
            except Exception:  # of one row: its own walk raises it again
                for ahead in group:
                    ahead.sampler._foreseen = None

    def _all_nodes(self, tree: TokenTree, outputs: Any) -> _Ahead | None:
        """All nodes that the walk may reach, as memory allows. The walk selects the tokens after other nodes."""
        assert self._noise is not None
        top = tree.depths[tree.root]
        logits = outputs.logits
        below = range(tree.root, len(tree))
        logit_rows = outputs.logit_rows.tolist()
        nodes = [node for node in below if logit_rows[node] >= 0 and tree.kinds[node] is not NodeKind.WINDOW]
        nodes = nodes[: max(MOST_BYTES // (4 * logits.shape[-1]), 1)]
        like = logits.new_empty((1, logits.shape[-1]), dtype=torch.float32)
        noise = self._noise.look_ahead(self._row, 1 + max(tree.depths[node] for node in nodes) - top, like)
        nodes = [node for node in nodes if tree.depths[node] - top < len(noise)]
        if not nodes:
            return None
        levels = [tree.depths[node] - top for node in nodes]
        return _Ahead(self, nodes, [logit_rows[node] for node in nodes], outputs.downloads, noise, levels)

    def _is_alike_together(self, vocabulary: int) -> bool:
        """Whether the distributions of several rows have the bits of each by itself; tried once for such processors."""
        key = self.alike, vocabulary
        if key not in _TRIED:
            logits = 4 * torch.randn((5, vocabulary), generator=torch.Generator().manual_seed(0))
            parts = (logits, *(logits[row : row + 1] for row in range(len(logits))))
            together, *single = (torch.nn.functional.softmax(self._process(None, rows), dim=-1) for rows in parts)
            while len(_TRIED) >= _MOST_TRIED:
                _TRIED.pop(next(iter(_TRIED)), None)
            _TRIED[key] = torch.equal(together, torch.cat(single))
        return _TRIED[key]

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        place = None if self._foreseen is None else self._foreseen.places.get(node)
        if self._foreseen is not None and place is not None:
            scores, probabilities = (rows[place : place + 1] for rows in self._foreseen[2:])
            assert self._noise is not None
            if self._foreseen.read is None:
                if self.keeps:
                    self.keep(outputs.logits_after(node), scores)
                return self._sample(scores, self._noise, probabilities)
            token = int(self._foreseen.read()[place])
            if token >= 0:
                self._noise.take(self._row, probabilities)
                if self.keeps:
                    self.keep(outputs.logits_after(node), scores)
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
        """Collect the logits and scores of a token, if the caller asked for them."""
        for collected, values in ((self.logits, logits), (self.scores, scores)):
            if collected is not None:
                collected.append(values.clone())

    def _process(self, text: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Scores: the output of the processors. `logits` stay as they are."""
        scores = logits if self._ignores_text else logits.clone()  # such processors may write into it
        for one in self._processors:  # without a look at the signature of each, as in transformers' list
            scores = one(text, scores)
        return scores

    def _sample(self, scores: torch.Tensor, noise: SamplingNoise, probabilities: torch.Tensor | None = None) -> int:
        """The token that `torch.multinomial` selects of the softmax of `scores`, with the noise of this place."""
        if probabilities is None:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
        self._like = probabilities
        drawn = noise.take(self._row, probabilities)
        is_usual = scores.device.type == "cpu" and scores.dtype == torch.float32
        selected = int((_selected_here if is_usual else _selected)(probabilities, drawn))  # the host waits for it
        if selected < 0:
            selected = int(torch.multinomial(probabilities, num_samples=1))  # which refuses it
        return selected


_TRIED: dict[object, bool] = {}
"""Results of `TextSampler._is_alike_together` by processors and vocabulary."""

_MOST_TRIED = 256
"""Results that are kept."""


def _sample_ahead(group: Sequence[_Ahead], logits: torch.Tensor) -> None:
    """Compute the distributions after nodes of several texts with equal processors, and select tokens if the noise is
    known."""
    rows = list[int]()
    levels = list[int]()
    begin = 0
    for ahead in group:
        rows += ahead.logit_rows
        levels += [begin + level for level in ahead.levels]
        begin += len(ahead.noise)
    sampler = group[0].sampler
    noise = [drawn for ahead in group for drawn in ahead.noise]
    places = upload(logits.device, np.array([rows, levels] if noise else [rows]))[0]
    scores = sampler._process(None, logits.index_select(0, places[0]).float())
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    read = None
    if noise:  # `_sample` refuses NaN
        tokens = _selected(probabilities, torch.cat(noise).index_select(0, places[1]))
        read = group[0].downloads.add(tokens.int())
    begin = 0
    for ahead in group:
        numbers = {node: begin + place for place, node in enumerate(ahead.nodes)}
        ahead.sampler._foreseen = _Foreseen(numbers, read, scores, probabilities)
        begin += len(ahead.nodes)


def _setting(processors: Sequence[Any]) -> list[object]:
    """Kinds and settings of processors, equal for processors that do the same."""
    found: list[object] = []
    for one in processors:
        found.append(type(one))
        for name, value in vars(one).items():
            found.append((name, value.tolist() if isinstance(value, torch.Tensor) else value))
    return found


def _selected(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """What `torch.multinomial` selects of each row with its noise, `[rows]`; -1 where probabilities are no numbers."""
    selected = (probabilities / noise).argmax(dim=-1)
    return selected.masked_fill(probabilities.gather(1, selected[:, None])[:, 0].isnan(), -1)


def _selected_here(probabilities: torch.Tensor, noise: torch.Tensor) -> int:
    """`_selected` for one row on the CPU, in a fifth of torch's time."""
    selected = int((probabilities / noise).numpy()[0].argmax())
    return -1 if isnan(probabilities[0, selected]) else selected


def _listed(processor: Processor | None) -> list[Any]:
    """The processors that one may consist of."""
    if processor is None:
        return []
    return list(processor) if isinstance(processor, LogitsProcessorList) else [processor]
