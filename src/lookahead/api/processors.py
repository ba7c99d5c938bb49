"""Logits processors for the rows of a batch, each at its own place in its own text."""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from lookahead.errors import UnsupportedArgumentError


def row_processors(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """The processors of one row of a batch.

    Plain decoding hands a processor all rows at once; here rows are at different places, so each is processed
    by itself, `[1, tokens]` and `[1, vocabulary]`. Processors that hold something for each row of the batch are
    narrowed to theirs. A user-defined one must treat each row by itself and all rows equally, as transformers' own do.

    Raises:
        UnsupportedArgumentError: A processor cannot be narrowed to one row.
    """
    if batch_size == 1:
        return processors
    return LogitsProcessorList([_narrow(processor, row, batch_size) for processor in processors])


def _narrow(processor: LogitsProcessor, row: int, batch_size: int) -> LogitsProcessor:
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise UnsupportedArgumentError(
            "guidance_scale runs the model a second time over all rows at once, which lookahead decoding cannot do for "
            "rows at different places; call generate once for each row"
        )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), processor._num_beams)
    narrowed = copy.copy(processor)
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        prompts = processor.encoder_input_ids
        # Made before the prompts were repeated for `num_return_sequences`.
        prompt = row * len(prompts) // batch_size
        narrowed.encoder_input_ids = prompts[prompt : prompt + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // batch_size
        narrowed.generated_ngrams, narrowed.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    elif isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        narrowed.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # keeps a running state of what it has seen
    else:
        return processor
    return narrowed
