"""A text as transformers' processors and criteria see it, and the sampler of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processing

from lookahead.backends.machine import Downloads, Read, upload
from lookahead.backends.transformers.noise import MAX_BYTES, SamplingNoise
from lookahead.core.forest import Forest
from lookahead.core.protocols import Drafter
from lookahead.core.sequence import SequenceState, Stop
from lookahead.core.token_tree import NodeKind, Noise, TokenTree


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
        return self._ids[:, : self.length]


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits processor: maps a text `[1, tokens]` and scores `[1, vocabulary]` to scores."""

IGNORE_TEXT = (
    *(processing.TemperatureLogitsWarper, processing.TopKLogitsWarper, processing.TopPLogitsWarper),
    *(processing.MinPLogitsWarper, processing.TypicalLogitsWarper, processing.EpsilonLogitsWarper),
    *(processing.EtaLogitsWarper, processing.LogitNormalization, processing.InfNanRemoveLogitsProcessor),
    processing.SuppressTokensLogitsProcessor,
)
"""Processors that treat each row of scores separately, and ignore the text."""


class _Ahead(NamedTuple):
    """Nodes of one text, to sample after them together with other texts.

    Attributes:
        sampler: Sampler of the text.
        nodes: Nodes of the tree.
        logit_rows: Row of the logits after each.
        downloads: Copies from the device.
        noise: Noise of the next indices of the text, `[1, vocabulary]` each; empty if it is drawn later.
        levels: Index in `noise` for each node.
    """

    sampler: TextSampler
    nodes: list[int]
    logit_rows: list[int]
    downloads: Downloads
    noise: list[torch.Tensor]
    levels: list[int]


class _Foreseen(NamedTuple):
    """Distributions, and possibly tokens, after the nodes of a step.

    Attributes:
        rows: Row of each node in the other fields.
        read: Returns the tokens, `[nodes]`, -1 for invalid probabilities; `None` if they are not selected yet.
        scores: `[nodes, vocabulary]`.
        probabilities: `[nodes, vocabulary]`.
    """

    rows: dict[int, int]
    read: Read | None
    scores: torch.Tensor
    probabilities: torch.Tensor


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

    Attributes:
        samples: Whether tokens are sampled.
        needs_logits: Whether selection needs more than the likeliest token of the raw logits.
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
        self._like: torch.Tensor | None = None  # probabilities of the last sampled token
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
        """Return the noise of the next `tokens` tokens, if it is on the host."""
        if self._noise is None or self._like is None or self._like.device.type != "cpu":
            return None
        if not self._noise.can_foresee(tokens, self._like):
            return None
        values = [noise[0].float().numpy() for noise in self._noise.look_ahead(self._row, tokens, self._like)]
        return Noise(values, self._temperature)

    @classmethod
    def look_ahead_rows(cls, rows: Sequence[tuple[TextSequence, int]], forest: Forest, outputs: Any) -> None:
        """Start to sample after nodes of all texts with equal processors together.

        Noise depends only on the index in the text. Unless a processor uses the text, the token after a node therefore
        depends only on its depth and logits. On CUDA this selects tokens after all nodes, so that the host does not
        wait for each. On a CPU it computes the distributions after the roots of several texts, if a trial has shown
        equal bits for these processors.

        Args:
            rows: Text of each row, and its index in the forest.
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
            except Exception:  # the walk of the affected row raises it again
                for ahead in group:
                    ahead.sampler._foreseen = None

    def _all_nodes(self, tree: TokenTree, outputs: Any) -> _Ahead | None:
        """Return the nodes that the walk may reach, limited by memory; the walk itself selects after other nodes."""
        assert self._noise is not None
        top = tree.depths[tree.root]
        logits = outputs.logits
        below = range(tree.root, len(tree))
        logit_rows = outputs.logit_rows.tolist()
        nodes = [node for node in below if logit_rows[node] >= 0 and tree.kinds[node] is not NodeKind.WINDOW]
        nodes = nodes[: max(MAX_BYTES // (4 * logits.shape[-1]), 1)]
        like = logits.new_empty((1, logits.shape[-1]), dtype=torch.float32)
        noise = self._noise.look_ahead(self._row, 1 + max(tree.depths[node] for node in nodes) - top, like)
        nodes = [node for node in nodes if tree.depths[node] - top < len(noise)]
        if not nodes:
            return None
        levels = [tree.depths[node] - top for node in nodes]
        return _Ahead(self, nodes, [logit_rows[node] for node in nodes], outputs.downloads, noise, levels)

    def _is_alike_together(self, vocabulary: int) -> bool:
        """Return whether distributions of several rows have the bits of single rows; tried once for each setting."""
        key = self.alike, vocabulary
        if key not in _TRIED:
            logits = 4 * torch.randn((5, vocabulary), generator=torch.Generator().manual_seed(0))
            parts = (logits, *(logits[row : row + 1] for row in range(len(logits))))
            together, *single = (torch.nn.functional.softmax(self._process(None, rows), dim=-1) for rows in parts)
            while len(_TRIED) >= _MAX_TRIED:
                _TRIED.pop(next(iter(_TRIED)), None)
            _TRIED[key] = torch.equal(together, torch.cat(single))
        return _TRIED[key]

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        row = None if self._foreseen is None else self._foreseen.rows.get(node)
        if self._foreseen is not None and row is not None:
            scores, probabilities = (values[row : row + 1] for values in self._foreseen[2:])
            assert self._noise is not None
            if self._foreseen.read is None:
                if self.keeps:
                    self.keep(outputs.logits_after(node), scores)
                return self._sample(scores, self._noise, probabilities)
            token = int(self._foreseen.read()[row])
            if token >= 0:
                self._noise.take(self._row, probabilities)
                if self.keeps:
                    self.keep(outputs.logits_after(node), scores)
                return token
        text = None if self._ignores_text else sequence.ids  # `ids` copies new tokens
        return self.choose(text, outputs.logits_after(node).to(sequence.device))

    def choose(self, text: torch.Tensor | None, logits: torch.Tensor) -> int:
        """Select the token after `text` `[1, tokens]` from `logits` `[1, vocabulary]` float32.

        `text` may be `None` if all processors ignore it.
        """
        scores = self._process(text, logits)
        self.keep(logits, scores)
        return int(scores.argmax(dim=-1)) if self._noise is None else self._sample(scores, self._noise)

    def keep(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Collect the logits and scores of a token, if requested."""
        for collected, values in ((self.logits, logits), (self.scores, scores)):
            if collected is not None:
                collected.append(values.clone())

    def _process(self, text: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores: the output of the processors; `logits` stay unchanged."""
        scores = logits if self._ignores_text else logits.clone()  # other processors may write into it
        for one in self._processors:  # transformers' list inspects each signature
            scores = one(text, scores)
        return scores

    def _sample(self, scores: torch.Tensor, noise: SamplingNoise, probabilities: torch.Tensor | None = None) -> int:
        """Select a token from the softmax of `scores` as `torch.multinomial` does, by the noise of this index."""
        if probabilities is None:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
        self._like = probabilities
        drawn = noise.take(self._row, probabilities)
        is_usual = scores.device.type == "cpu" and scores.dtype == torch.float32
        selected = int((_selected_here if is_usual else _selected)(probabilities, drawn))  # waits for the device
        if selected < 0:
            selected = int(torch.multinomial(probabilities, num_samples=1))  # raises its error
        return selected


_TRIED: dict[object, bool] = {}
"""Results of `TextSampler._is_alike_together` by processors and vocabulary."""

_MAX_TRIED = 256
"""Largest number of cached results."""


def _sample_ahead(group: Sequence[_Ahead], logits: torch.Tensor) -> None:
    """Compute the distributions after nodes of several texts, and select tokens if there is noise."""
    rows = list[int]()
    levels = list[int]()
    begin = 0
    for ahead in group:
        rows += ahead.logit_rows
        levels += [begin + level for level in ahead.levels]
        begin += len(ahead.noise)
    sampler = group[0].sampler
    noise = [drawn for ahead in group for drawn in ahead.noise]
    indices = upload(logits.device, np.array([rows, levels] if noise else [rows]))[0]
    scores = sampler._process(None, logits.index_select(0, indices[0]).float())
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    read = None
    if noise:  # `_sample` refuses NaN
        tokens = _selected(probabilities, torch.cat(noise).index_select(0, indices[1]))
        read = group[0].downloads.add(tokens.int())
    begin = 0
    for ahead in group:
        rows_of_nodes = {node: begin + number for number, node in enumerate(ahead.nodes)}
        ahead.sampler._foreseen = _Foreseen(rows_of_nodes, read, scores, probabilities)
        begin += len(ahead.nodes)


def _setting(processors: Sequence[Any]) -> list[object]:
    """Return classes and settings of processors, as a key."""
    setting: list[object] = []
    for one in processors:
        setting.append(type(one))
        for name, value in vars(one).items():
            setting.append((name, value.tolist() if isinstance(value, torch.Tensor) else value))
    return setting


def _selected(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the tokens `[rows]` that `torch.multinomial` selects with this noise; -1 for invalid probabilities."""
    selected = (probabilities / noise).argmax(dim=-1)
    return selected.masked_fill(probabilities.gather(1, selected[:, None])[:, 0].isnan(), -1)


def _selected_here(probabilities: torch.Tensor, noise: torch.Tensor) -> int:
    """Return `_selected` for one row on the CPU, five times as fast."""
    selected = int((probabilities / noise).numpy()[0].argmax())
    return -1 if isnan(probabilities[0, selected]) else selected


def _listed(processor: Processor | None) -> list[Any]:
    """Return the members of a processor."""
    if processor is None:
        return []
    return list(processor) if isinstance(processor, LogitsProcessorList) else [processor]
