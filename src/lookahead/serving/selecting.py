"""Selection of tokens: processors of a row, log-probabilities, and the stop rule."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as processing

from lookahead.backends.base import Prompts
from lookahead.backends.machine import Read, upload
from lookahead.backends.transformers.early_sampling import log_early, packed_logprobs
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.forest import Forest
from lookahead.core.results import EarlyTokens
from lookahead.errors import InvalidArgumentError
from lookahead.serving.handle import TokenEvent

if TYPE_CHECKING:
    from lookahead.serving.arguments import Arguments


_BY_ROW = {
    "transformers.generation.logits_process": (
        *("EncoderNoRepeatNGram", "EncoderRepetitionPenalty", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove"),
        *("MinLength", "MinNewTokensLength", "NoBadWords", "NoRepeatNGram", "RepetitionPenalty", "SequenceBias"),
        *("SuppressTokens", "SuppressTokensAtBegin", "SynthIDTextWatermark", "Watermark", "WhisperTimeStamp"),
        *("Epsilon", "Eta", "MinP", "Temperature", "TopH", "TopK", "TopP", "Typical"),
        *("ExponentialDecayLengthPenalty", "LogitNormalization"),
    ),
    "transformers.generation.stopping_criteria": ("EosToken", "MaxLength", "MaxTime", "StopString"),
}
"""Classes of transformers that treat each row of a batch separately, without the suffix of their names."""

_ENDS = re.compile("(LogitsProcessor|LogitsWarper|Criteria)$")


def in_lock_step(arguments: Arguments) -> bool:
    """Return whether the rows of a call must advance together.

    They must, unless all processors and criteria are known to treat each row separately. User classes and functions may
    compare rows, count calls or keep a state.
    """
    kinds = map(type, [*arguments.processors, *arguments.criteria])
    known = all(_ENDS.sub("", kind.__name__) in _BY_ROW.get(kind.__module__, ()) for kind in kinds)
    return arguments.prompts.rows > 1 and not known


def row_processors(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """Return the processors of one row of a batch without lock step.

    The rows have different lengths, so processors are called for one row: `[1, tokens]` and `[1, vocabulary]`.
    Processors with data for each row of the batch are narrowed to the data of this row.
    """
    if batch_size == 1:
        return processors
    return LogitsProcessorList([_narrow(processor, row, batch_size) for processor in processors])


def _narrow(processor: processing.LogitsProcessor, row: int, batch_size: int) -> processing.LogitsProcessor:
    narrowed = copy.copy(processor)
    if isinstance(processor, processing.EncoderRepetitionPenaltyLogitsProcessor):
        prompts = processor.encoder_input_ids
        # Made before the prompts were repeated for `num_return_sequences`.
        prompt = row * len(prompts) // batch_size
        narrowed.encoder_input_ids = prompts[prompt : prompt + 1]
    elif isinstance(processor, processing.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // batch_size
        narrowed.generated_ngrams, narrowed.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    elif isinstance(processor, processing.RepetitionPenaltyLogitsProcessor) and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        narrowed.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif isinstance(processor, processing.SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # keeps a state of the text
    else:
        return processor
    return narrowed


def warn_of_last_position(tokens: int) -> None:
    """Warn that a text ends at the model's last position; transformers would fail there."""
    warnings.warn(f"generation stopped at {tokens} tokens: the model has no position for another one", stacklevel=2)


class LogprobSampler(TextSampler):
    """Sampler that records the log-probabilities of selected tokens.

    Args:
        top: Number of likeliest tokens to record with each.
        **options: Arguments of `TextSampler`.
    """

    def __init__(self, top: int, **options: Any) -> None:
        super().__init__(**options)
        self.top = top
        self._selects = self.needs_logits
        self.needs_logits = self.records = True
        self._records: list[tuple[int, Read, int]] = []
        self._early: dict[int, tuple[Read, int]] = {}

    @classmethod
    def look_ahead_rows(
        cls, rows: Sequence[tuple[TextSequence, int]], forest: Forest, outputs: Any
    ) -> list[EarlyTokens]:
        """See `Sampler`. On a device log-probabilities are computed early too, if there is one pass."""
        early = super().look_ahead_rows(rows, forest, outputs)
        passes = {id(outputs[row].whole) for _, row in rows}
        on_device = len(passes) == 1 and not outputs[rows[0][1]].logits.is_cpu
        packed = log_early(rows, forest, outputs) if on_device else {}
        for sequence, row in rows:
            first, end = forest.firsts[row : row + 2].tolist()
            nodes = {node - first: packed[node] for node in range(first, end) if node in packed}
            cast(LogprobSampler, sequence.sampler)._early = nodes
        return early

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        token = super().select(sequence, outputs, node) if self._selects else int(outputs.predictions[node])
        read, place = self._early.get(node, (None, 0))
        if read is None or read()[place, 0] != token:
            logits = outputs.logits_after(node)
            packed = packed_logprobs(logits, upload(logits.device, np.array([token]))[0], self.top)
            read, place = outputs.downloads.add(packed), 0  # one copy to the host for all rows of the step
        self._records.append((token, read, place))
        return token

    def take(self) -> list[TokenEvent]:
        """Return the events of the tokens selected since the last call."""
        records = self._records
        self._records = []
        events = []
        for token, read, place in records:
            packed = read()[place]
            count = len(packed) // 2 + 1
            top = zip(packed[2:count].tolist(), packed[count:].view(np.float32).tolist(), strict=True)
            events.append(TokenEvent(token, float(packed[1:2].view(np.float32)[0]), tuple(islice(top, self.top))))
        return events


class StopRule:
    """Evaluates transformers' stopping criteria after every token.

    The end-of-sequence token and the largest length are evaluated on plain numbers, without a kernel or a
    synchronisation with the device.

    Args:
        criteria: Criteria of the call, prepared by transformers.

    Attributes:
        has_eos: Whether there is an end-of-sequence criterion, so that ended rows are padded.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._eos: set[int] = set()
        self._max_length: int | None = None
        self._criteria = StoppingCriteriaList()
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria and self._max_length is None:
                self._max_length = criterion.max_length
            else:
                self._criteria.append(criterion)

    @property
    def has_further_criteria(self) -> bool:
        """Whether there are other criteria than end tokens and length; they may depend on time or other state."""
        return bool(self._criteria)

    @property
    def end_tokens(self) -> tuple[int, ...] | None:
        """Token ids that complete a text; `None` if further criteria do too."""
        return None if self.has_further_criteria else tuple(sorted(self._eos))

    def ends_by_length(self, sequence: TextSequence) -> bool:
        """Return whether only the length limit ended a complete `sequence`."""
        if sequence.tokens[-1] in self._eos or self._max_length is None or sequence.length < self._max_length:
            return False
        texts = (criterion for criterion in self._criteria if isinstance(criterion, StopStringCriteria))
        return not any(_verdict(criterion, criterion(sequence.ids, None)) for criterion in texts)

    def max_tokens(self, width: int, tokens: int) -> int | None:
        """Return the largest number of tokens of a text without padding; `None` if it is unlimited.

        Args:
            width: Length of the prompt with padding.
            tokens: Length of the prompt without padding.
        """
        return None if self._max_length is None else self._max_length - width + tokens

    def __call__(self, sequence: TextSequence) -> bool:
        """Return whether the last token completes `sequence`."""
        complete = sequence.tokens[-1] in self._eos
        complete |= self._max_length is not None and sequence.length >= self._max_length
        scores = None if sequence.sampler.scores is None else tuple(sequence.sampler.scores)
        for criterion in self._criteria:
            complete |= _verdict(criterion, criterion(sequence.ids, scores))
        if not complete and sequence.last_length is not None and sequence.length >= sequence.last_length:
            warn_of_last_position(len(sequence.tokens))
            return True
        return complete


def _verdict(criterion: object, result: object) -> bool:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return bool(result)
    if isinstance(result, bool):
        return result
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    raise InvalidArgumentError(
        f"stopping_criteria: {type(criterion).__name__} returned {shape}; it must return a bool tensor of shape (1,), "
        "one entry for each row of its input_ids"
    )


def last_lengths(last_length: int | None, prompts: Prompts, has_eos: bool) -> list[int] | list[None]:
    """Return the largest length of each row for the model's positions, padding included.

    Without padding of ended rows all rows end with the first.

    Args:
        last_length: Largest number of tokens for the model's positions; unlimited if `None`.
        prompts: Prompts of the rows.
        has_eos: Whether ended rows are padded.
    """
    if last_length is None:
        return [None] * prompts.rows
    ends = [last_length - earlier + hidden for hidden, earlier in zip(prompts.padding, prompts.before, strict=True)]
    return ends if has_eos else [min(ends)] * len(ends)
