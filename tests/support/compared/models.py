"""The models of cases."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

import model_zoo
from compared.case import Case
from tiny.families import build

ZOO = "zoo/"
"""Before the name of a model of the zoo."""


def load(case: Case) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model of a case, and the one for transformers' answers: its copy, or the same one where nothing changes it.

    Raises:
        CannotBuild: It could not be built.
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
    """Whether the model of a case is one for all cases."""
    return case.family == model_zoo.DEMO or case.family.startswith(ZOO)


@torch.no_grad()
def forget(model: PreTrainedModel) -> None:
    """Make a model forget the texts before: dynamic RoPE keeps the frequencies of the longest one it read.

    Without this `model.generate` itself does not write the same text twice. A short pass resets them.
    """
    model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)


def _breaks_in_double(case: Case, model: PreTrainedModel) -> bool:
    """Whether transformers itself is wrong in float64: `eager` takes the softmax in float32, where the mask of a hidden
    token, the least float64, is minus infinity, and a row without anything else to see is NaN."""
    hidden = any(any(turn.padding) or turn.holes for turn in case.turns)
    return hidden and model.config.get_text_config(decoder=True)._attn_implementation == "eager"
