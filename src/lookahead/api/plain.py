"""Plain decoding by transformers, for what lookahead decoding refuses; see `LookaheadConfig.fallback`."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lookahead.core.statistics import OnStep, Statistics, StepRecord
from lookahead.serving.output import LookaheadOutput
from lookahead.serving.prepared import language_model


class FirstToken:
    """Notes that a call has written something: from then on it can only go on or fail.

    Args:
        on_step: The caller's listener, which is told as before.

    Attributes:
        came: Whether there was a step.
    """

    def __init__(self, on_step: OnStep | None) -> None:
        self._on_step = on_step
        self.came = False

    def __call__(self, record: StepRecord) -> None:
        """Listen to a step."""
        self.came = True
        if self._on_step is not None:
            self._on_step(record)


def decode_plainly(model: Any, input_ids: torch.Tensor | None, arguments: dict[str, Any]) -> Any:
    """What transformers' own `generate` returns; if it is a dict, with statistics of as many steps as tokens.

    Args:
        model: The model, or a wrapper.
        input_ids: The prompts, if they are given by this name.
        arguments: The other arguments of `model.generate`.
    """
    model = language_model(model)[0]
    if input_ids is None:
        return _with_statistics(type(model).generate(model, **arguments), arguments.get("inputs"))
    return _with_statistics(type(model).generate(model, input_ids, **arguments), input_ids)


def decode_prepared_plainly(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """The same where transformers has prepared the arguments for a decoding method already."""
    mode = arguments["generation_config"].get_generation_mode()
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    return _with_statistics(method(model, input_ids, **arguments), input_ids)


def _with_statistics(output: Any, input_ids: torch.Tensor | None) -> Any:
    if type(output) is not GenerateDecoderOnlyOutput:
        return output
    rows, width = output.sequences.shape
    steps = width - (1 if input_ids is None else input_ids.shape[1])
    ones = [1] * (rows * steps)
    statistics = Statistics(steps=steps, tokens=len(ones), nodes_per_step=ones, accepted_lengths=ones.copy())
    return LookaheadOutput(**output, statistics=statistics)
