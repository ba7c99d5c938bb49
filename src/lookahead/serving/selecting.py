"""Who selects the tokens of one text, and when it is complete."""

from __future__ import annotations

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any

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
from lookahead.backends.machine import Read
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
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
"""Classes of transformers, without the ends of their names, which are known to treat each row of a batch by itself."""

_ENDS = re.compile("(LogitsProcessor|LogitsWarper|Criteria)$")


def in_lock_step(arguments: Arguments) -> bool:
    """Whether the rows of a call have to go on together, as its processors and criteria are not all known to treat each
    row by itself.

    Of a class or function of a user's own nobody knows that: it may have a rule for each row, compare rows, count its
    calls, or follow the text by a state. No trial tells what it will do later.
    """
    kinds = map(type, [*arguments.processors, *arguments.criteria])
    known = all(_ENDS.sub("", kind.__name__) in _BY_ROW.get(kind.__module__, ()) for kind in kinds)
    return arguments.prompts.rows > 1 and not known


def row_processors(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """The processors of one row of a batch whose rows are not `in_lock_step`.

    Plain decoding hands a processor all rows at once; here rows are at different places, so each is processed
    by itself, `[1, tokens]` and `[1, vocabulary]`. Processors that hold something for each row of the batch are
    narrowed to theirs.
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
        return copy.deepcopy(processor)  # keeps a running state of what it has seen
    else:
        return processor
    return narrowed


def warn_of_last_position(tokens: int) -> None:
    """Say why a text ends where transformers would fail and lose it."""
    warnings.warn(f"generation stopped at {tokens} tokens: the model has no position for another one", stacklevel=2)


class LogprobSampler(TextSampler):
    """A sampler that notes the log-probabilities of what it selects.

    Args:
        top: How many of the likeliest tokens to note each time.
        **options: As for `TextSampler`.
    """

    def __init__(self, top: int, **options: Any) -> None:
        super().__init__(**options)
        self._top, self._selects, self.needs_logits = top, self.needs_logits, True
        self._noted: list[tuple[int, Read, Read]] = []

    def select(self, sequence: TextSequence, outputs: Any, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        token = super().select(sequence, outputs, node) if self._selects else int(outputs.predictions[node])
        logprobs = outputs.logits_after(node)[0].log_softmax(-1)
        values, ids = logprobs.topk(min(self._top, len(logprobs)))
        found = torch.cat([logprobs[token : token + 1], values]).view(torch.int32)
        bring = outputs.downloads.add  # with those of all rows of the step
        self._noted.append((token, bring(found), bring(ids.int())))
        return token

    def take(self) -> list[TokenEvent]:
        """Take the events of the tokens selected since the last call."""
        noted, self._noted = self._noted, []
        events = []
        for token, found, ids in noted:
            selected, *values = found().view(np.float32).tolist()
            events.append(TokenEvent(token, selected, tuple(zip(ids().tolist(), values, strict=True))))
        return events


class StopRule:
    """Evaluates transformers' stopping criteria after every token, as plain decoding does.

    The two that every call has, the end-of-sequence token and the largest length, are evaluated on plain
    numbers, so that they need neither a kernel nor a synchronisation with the device.

    Args:
        criteria: The prepared criteria of the call.

    Attributes:
        has_eos: Whether rows that end are filled up with padding, as transformers does when there is an
            end-of-sequence criterion.
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
    def asks_others(self) -> bool:
        """Whether there are criteria besides those two, which may depend on time or other state."""
        return bool(self._criteria)

    @property
    def end_tokens(self) -> tuple[int, ...] | None:
        """Token ids that complete a text, if nothing else does but its length; else `None`."""
        return None if self.asks_others else tuple(sorted(self._eos))

    def ends_by_length(self, sequence: TextSequence) -> bool:
        """Whether a complete `sequence` ended only because it reached its length limit."""
        if sequence.tokens[-1] in self._eos or self._max_length is None or sequence.length < self._max_length:
            return False
        texts = (criterion for criterion in self._criteria if isinstance(criterion, StopStringCriteria))
        return not any(_answer(criterion, criterion(sequence.ids, None)) for criterion in texts)

    def most_tokens(self, width: int, tokens: int) -> int | None:
        """Tokens, padding left out, at which a text is complete at the latest; `None` if that is open. Its prompt has
        `tokens` without padding and is `width` long with it."""
        return None if self._max_length is None else self._max_length - width + tokens

    def __call__(self, sequence: TextSequence) -> bool:
        """Whether `sequence` is complete with the token it has just got."""
        done = sequence.tokens[-1] in self._eos
        done |= self._max_length is not None and sequence.length >= self._max_length
        scores = None if sequence.sampler.scores is None else tuple(sequence.sampler.scores)
        for criterion in self._criteria:
            done |= _answer(criterion, criterion(sequence.ids, scores))
        if not done and sequence.last_length is not None and sequence.length >= sequence.last_length:
            warn_of_last_position(len(sequence.tokens))
            return True
        return done


def _answer(criterion: object, result: object) -> bool:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return bool(result)
    if isinstance(result, bool):
        return result
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    raise InvalidArgumentError(
        f"stopping_criteria: {type(criterion).__name__} returned {shape}; it must return a bool tensor of shape (1,), "
        "one entry for each sequence of the text it was given"
    )


def last_lengths(last_length: int | None, prompts: Prompts, has_eos: bool) -> list[int] | list[None]:
    """Lengths, padding included, at which the model can read no further token of each row.

    Where nothing fills up a row that ended, all of them end with the first.

    Args:
        last_length: Tokens that count after which there is no position for another one, if that is so.
        prompts: What the rows begin with.
        has_eos: Whether rows that end are filled up.
    """
    if last_length is None:
        return [None] * prompts.rows
    ends = [last_length - earlier + hidden for hidden, earlier in zip(prompts.padding, prompts.before, strict=True)]
    return ends if has_eos else [min(ends)] * len(ends)
