"""Models with an encoder: their families, and what they read where that is not text."""

from __future__ import annotations

from functools import cache

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

ENCODER = "/encoder"
"""Behind a model type: the class with an encoder."""
START_TOKEN = 2
"""What each text of a decoder begins with."""

NAMES = {**MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
_SAMPLES = 4000


@cache
def encoder_families() -> list[str]:
    """Names of the families with an encoder for text or speech, sorted."""
    return sorted(
        kind + ENCODER for kind in NAMES if CONFIG_MAPPING[kind].is_encoder_decoder or _is_so_by_default(kind)
    )


def _is_so_by_default(kind: str) -> bool:
    try:
        return bool(CONFIG_MAPPING[kind]().is_encoder_decoder)
    except Exception:  # it is made of two others
        return False


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether `model` has an encoder."""
    return bool(model.config.is_encoder_decoder)


def read_by(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the encoder of `model` is given: the prompts `[rows, tokens]`, or sound that follows from their numbers."""
    name = model.main_input_name
    if name == "input_ids":
        return {name: ids, "attention_mask": mask}
    draws = torch.Generator().manual_seed(int(ids.sum()))
    config, rows = model.config, len(ids)
    if name == "input_values":
        return {name: torch.randn(rows, _SAMPLES, generator=draws, dtype=model.dtype)}
    bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    frames = 2 * config.max_source_positions
    shape = (rows, bins, frames) if config.model_type == "whisper" else (rows, frames, bins)
    return {name: torch.randn(shape, generator=draws, dtype=model.dtype)}
