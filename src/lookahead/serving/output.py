"""What `generate` returns, and what streamers get."""

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
    """What `generate` returns with `return_dict_in_generate=True`.

    All fields of transformers' `GenerateDecoderOnlyOutput`, and:

    Args:
        statistics: Counts and times of the call.
    """

    statistics: Statistics = None  # type: ignore[assignment]  # fields of transformers, which have defaults, come first


class EncoderDecoderOutput(EitherCacheName, GenerateEncoderDecoderOutput):  # type: ignore[misc]
    """The same for a model with an encoder: all fields of transformers' `GenerateEncoderDecoderOutput`.

    Attributes:
        statistics: Counts and times of the call; no item of the dict, as Whisper takes each item for tensors.
    """

    statistics: Statistics | None = None


def make_output(
    sequences: Sequence[TextSequence],
    arguments: Arguments,
    pad_token: int | None,
    statistics: Statistics,
    cache: Cache | None = None,
) -> torch.Tensor | LookaheadOutput | EncoderDecoderOutput:
    """Build the output of a call from its rows: the texts `[batch, tokens]`, or a dict if `arguments` ask for one.

    Args:
        pad_token: Fills up rows that ended early.
        statistics: Counts and times; those of the drafters are added.
        cache: The cache that is returned, if one is.
    """
    ids = [sequence.ids[0] for sequence in sequences]
    texts = pad_sequence(ids, batch_first=True, padding_value=pad_token or 0)  # without one, all are of one length
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
    """The texts as plain decoding leaves them in its cache: it goes on with a row that ended, by padding."""
    longest = max(sequence.length for sequence in sequences)
    texts = []
    for sequence in sequences:
        end = longest if sequence.last_length is None else min(longest, sequence.last_length)
        texts.append([*sequence.tokens, *[pad_token or 0] * (end - sequence.length)])
    return texts


def _stacked(collected: Sequence[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """What the samplers of all rows collected, one `[batch, vocabulary]` for each token; zero where a row has ended."""
    rows = [tensors for tensors in collected if tensors is not None]
    if not rows:
        return None
    stacked = []
    for place in zip_longest(*rows):
        found = [values for values in place if values is not None]
        stacked.append(torch.cat([torch.zeros_like(found[0]) if values is None else values for values in place]))
    return tuple(stacked)


class StreamFeeder:
    """Gives a streamer what transformers would: first the prompts, then for each position one token of every row.

    Rows of a batch get ahead of each other; a position is handed over when all rows have reached it.

    Args:
        streamer: The caller's streamer.
        prompts: What it gets first, `[rows, tokens]`.
        pad_token: Stands for the tokens of a row that is finished; `None` if all rows go on to the end.
    """

    def __init__(self, streamer: BaseStreamer, prompts: torch.Tensor, pad_token: int | None) -> None:
        self._streamer = streamer
        self._prompts: torch.Tensor | None = prompts
        self._waiting: list[deque[int]] = [deque() for _ in prompts]
        self._finished = [False] * len(prompts)
        self._pad_token = pad_token

    def add(self, step: StepRecord) -> None:
        """Take the tokens of a step, and hand over the positions that are complete with them.

        The prompts come with the first one: until then the call may be refused.
        """
        if self._prompts is not None:
            self._streamer.put(self._prompts.cpu())
            self._prompts = None
        self._waiting[step.index].extend(step.tokens)
        self._finished[step.index] = step.finished and self._pad_token is not None
        while any(self._waiting) and all(
            tokens or finished for tokens, finished in zip(self._waiting, self._finished, strict=True)
        ):
            column = [tokens.popleft() if tokens else self._pad_token for tokens in self._waiting]
            self._streamer.put(torch.tensor(column))

    def end(self) -> None:
        """Tell the streamer that this was all."""
        self._streamer.end()
