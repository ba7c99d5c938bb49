"""Models with an encoder: their families, and encoder inputs other than text."""

from __future__ import annotations

from functools import cache

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

ENCODER = "/encoder"
"""Suffix of a model type for the class with an encoder."""
START_TOKEN = 2
"""First token of a decoder's texts."""

NAMES = {**MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
_SAMPLES = 4000


@cache
def encoder_families() -> list[str]:
    """Return the sorted names of families with an encoder for text or speech."""
    return sorted(
        kind + ENCODER for kind in NAMES if CONFIG_MAPPING[kind].is_encoder_decoder or _is_so_by_default(kind)
    )


def _is_so_by_default(kind: str) -> bool:
    try:
        return bool(CONFIG_MAPPING[kind]().is_encoder_decoder)
    except Exception:  # composed of two other models
        return False


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Return whether `model` has an encoder."""
    return bool(model.config.is_encoder_decoder)


def read_by(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return inputs of `model`'s encoder: the prompts `[rows, tokens]`, or sound generated from their ids."""
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
