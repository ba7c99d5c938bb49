"""Outputs of `generate`, and the feeding of streamers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from lookahead.backends.transformers.cache_names import CACHE, EitherCacheName
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.serving.arguments import Arguments


@dataclass
class LookaheadOutput(EitherCacheName, GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Output of `generate` with `return_dict_in_generate=True`: transformers' `GenerateDecoderOnlyOutput`.

    Attributes:
        statistics: Counts and times of the call.
    """

    statistics: Statistics = None  # type: ignore[assignment]  # a default is required after fields with defaults


class EncoderDecoderOutput(EitherCacheName, GenerateEncoderDecoderOutput):  # type: ignore[misc]
    """Output for a model with an encoder: transformers' `GenerateEncoderDecoderOutput`.

    Attributes:
        statistics: Counts and times of the call. It is not an item of the dict: Whisper expects tensors in all items.
    """

    statistics: Statistics | None = None


def make_output(
    sequences: Sequence[TextSequence],
    arguments: Arguments,
    pad_token: int | None,
    statistics: Statistics,
    cache: Cache | None = None,
) -> torch.Tensor | LookaheadOutput | EncoderDecoderOutput:
    """Make the output of a call: the texts `[batch, tokens]`, or a dict with `return_dict_in_generate`.

    Args:
        sequences: The texts.
        arguments: Arguments of the call.
        pad_token: Padding after rows that ended early; `None` if all rows have the same length.
        statistics: Counts and times; the drafters' own are added.
        cache: Cache to return.
    """
    ids = [sequence.ids[0] for sequence in sequences]
    texts = pad_sequence(ids, batch_first=True, padding_value=pad_token or 0)
    if not arguments.config.return_dict_in_generate:
        return texts
    statistics.sources = [sequence.ask_drafter(lambda drafter: drafter.statistics(), {}) for sequence in sequences]
    fields = {
        "sequences": texts,
        "scores": _stacked([sequence.sampler.scores for sequence in sequences]),
        "logits": _stacked([sequence.sampler.logits for sequence in sequences]),
        CACHE: cache,
    }
    if not arguments.prompts.source:
        return LookaheadOutput(**fields, statistics=statistics)
    output = EncoderDecoderOutput(**fields)
    output.statistics = statistics
    return output


def padded_texts(sequences: Sequence[TextSequence], pad_token: int | None) -> list[list[int]]:
    """Return the texts in the cache after plain decoding, which continues ended rows with padding."""
    longest = max(sequence.length for sequence in sequences)
    texts = []
    for sequence in sequences:
        end = longest if sequence.last_length is None else min(longest, sequence.last_length)
        texts.append([*sequence.tokens, *[pad_token or 0] * (end - sequence.length)])
    return texts


def _stacked(collected: Sequence[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Stack scores or logits of all rows to `[batch, vocabulary]` for each token, with zeros after a row's end."""
    rows = [tensors for tensors in collected if tensors is not None]
    if not rows:
        return None
    stacked = []
    for column in zip_longest(*rows):
        template = next(values for values in column if values is not None)
        stacked.append(torch.cat([torch.zeros_like(template) if values is None else values for values in column]))
    return tuple(stacked)


class StreamFeeder:
    """Feeds a streamer as transformers does: the prompts, then one token of every row for each position.

    Rows of a batch get ahead of each other; a position is sent when all rows have reached it.

    Args:
        streamer: The caller's streamer.
        prompts: Prompts `[rows, tokens]`.
        pad_token: Token for finished rows; `None` if all rows continue to the end.
    """

    def __init__(self, streamer: BaseStreamer, prompts: torch.Tensor, pad_token: int | None) -> None:
        self._streamer = streamer
        self._prompts: torch.Tensor | None = prompts.to("cpu", copy=True)  # processors may write into them
        self._waiting: list[deque[int]] = [deque() for _ in prompts]
        self._finished = [False] * len(prompts)
        self._pad_token = pad_token
        self._has_failed = False

    def add(self, step: StepRecord) -> None:
        """Add the tokens of a step, and send the complete positions.

        The prompts are sent with the first step: before it the call may fail.
        """
        if self._has_failed:  # other rows of the step still have tokens
            return
        self._has_failed = True
        if self._prompts is not None:
            self._streamer.put(self._prompts)
            self._prompts = None
        self._waiting[step.index].extend(step.tokens)
        self._finished[step.index] = step.finished and self._pad_token is not None
        while any(self._waiting) and all(
            tokens or finished for tokens, finished in zip(self._waiting, self._finished, strict=True)
        ):
            column = [tokens.popleft() if tokens else self._pad_token for tokens in self._waiting]
            self._streamer.put(torch.tensor(column, device="cpu"))
        self._has_failed = False

    def end(self) -> None:
        """End the stream."""
        self._streamer.end()
