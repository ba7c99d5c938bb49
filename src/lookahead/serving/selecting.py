"""Who selects the tokens of one text: its logits processors, its sampler, and log-probabilities of what it selected."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from lookahead.backends.transformers.noise import RowNoise
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.core.protocols import NodeOutputs
from lookahead.errors import UnsupportedArgumentError
from lookahead.serving.handle import TokenEvent


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


def make_sampler(processors: LogitsProcessorList, config: GenerationConfig, noise: RowNoise) -> TextSampler:
    """Who selects the tokens of one row, as `config` has it; with `noise`, where that says to sample."""
    keep = bool(config.return_dict_in_generate)
    return TextSampler(
        processor=processors if len(processors) else None,
        noise=noise if config.do_sample else None,
        keep_logits=keep and bool(config.output_logits),
        keep_scores=keep and bool(config.output_scores),
    )


class LogprobSampler:
    """A sampler that notes the log-probabilities of what another one selects.

    Args:
        sampler: The other one.
        top: How many of the likeliest tokens to note each time.

    Attributes:
        noted: One for each token that was selected.
    """

    needs_logits = True

    def __init__(self, sampler: TextSampler, top: int) -> None:
        self._sampler = sampler
        self._top = top
        self.noted: list[TokenEvent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def select(self, sequence: TextSequence, outputs: NodeOutputs, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`."""
        token = self._sampler.select(sequence, outputs, node)
        logits: torch.Tensor = outputs.logits_after(node)[0]
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self._top, len(logprobs))) if self._top else (logprobs[:0], logprobs[:0])
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.noted.append(TokenEvent(token, float(logprobs[token]), top))
        return token
