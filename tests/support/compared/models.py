"""Models of cases."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

import model_zoo
from compared.case import Case
from tiny.families import build

ZOO = "zoo/"
"""Prefix of the names of the zoo's models."""


def load(case: Case) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model of a case, and a copy for transformers' answers, or the same model if nothing changes it.

    Raises:
        CannotBuild: The model cannot be built.
    """
    if is_shared(case):
        model = model_zoo.build(case.family.removeprefix(ZOO), case.variant.seed, case.attention)
        model = copy.deepcopy(model).double() if case.double else model
        return model, model
    model = build(case.family, case.variant, case.attention, case.double)
    if case.double and _breaks_in_double(case, model):
        model = build(case.family, case.variant, case.attention)
    return model, copy.deepcopy(model)


def is_shared(case: Case) -> bool:
    """Return whether cases share the model of `case`."""
    return case.family == model_zoo.DEMO or case.family.startswith(ZOO)


@torch.no_grad()
def forget(model: PreTrainedModel) -> None:
    """Reset a model's RoPE frequencies by a short pass: dynamic RoPE keeps the frequencies of the longest text so far.

    Otherwise `model.generate` itself would not repeat its text.
    """
    model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)


def _breaks_in_double(case: Case, model: PreTrainedModel) -> bool:
    """Return whether transformers is wrong in float64: `eager` computes the softmax in float32, and the mask value,
    the lowest float64, becomes minus infinity there, so rows that see only hidden tokens are NaN."""
    hidden = any(any(turn.padding) or turn.holes for turn in case.turns)
    return hidden and model.config.get_text_config(decoder=True)._attn_implementation == "eager"
