"""Encoder-decoders: the encoder runs once, and what it gave goes into each pass of the decoder, which runs chains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

Source = Mapping[str, Any]
"""Arguments of the forward pass that are the same for each pass over a text: what the encoder gave, and its mask."""

_OF_THE_ENCODER = ("encoder_outputs", "attention_mask", "global_attention_mask")
_TRIED_LENGTH = 20
"""Places of what stands for an encoder's output in trials: more than the windows of a miniature."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether `model` reads a text, an image or sound with an encoder before it writes."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def take_source(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take what is about the encoder out of what transformers would hand to the model.

    What is left is about the decoder, by the names of models without an encoder.
    """
    source = {name: model_kwargs.pop(name) for name in _OF_THE_ENCODER if model_kwargs.get(name) is not None}
    for name in ("attention_mask", "position_ids"):
        if (own := model_kwargs.pop(f"decoder_{name}", None)) is not None:
            model_kwargs[name] = own
    return source


def source_of_row(source: Source, row: int, rows: int) -> Source:
    """The part of a batch of `rows` that is about one of them."""
    return {name: _part(value, row, rows) for name, value in source.items()}


def _part(value: Any, row: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[row : row + 1] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, tuple):
        return tuple(_part(item, row, rows) for item in value)
    if isinstance(value, Mapping):  # outputs of modules
        return type(value)(**{name: _part(item, row, rows) for name, item in value.items()})
    return value


def source_tokens(model: PreTrainedModel, source: Source, ids: torch.Tensor | None, rows: int) -> list[list[int]]:
    """The token ids that the encoder read for each of `rows` rows, hidden ones left out; none where it read no tokens
    of the decoder's vocabulary.

    Args:
        model: The model.
        source: What the encoder gave.
        ids: What was handed to it, `[rows or a part of them, ...]`.
        rows: Rows of the call: so many for each of `ids` as texts are to be returned.
    """
    if ids is None or ids.dim() != 2 or ids.is_floating_point() or rows % len(ids):
        return [[]] * rows
    if not 0 <= int(ids.min()) <= int(ids.max()) < model.get_input_embeddings().num_embeddings:
        return [[]] * rows
    mask = source.get("attention_mask")
    ids = ids.repeat_interleave(rows // len(ids), dim=0).cpu()
    if mask is None or mask.shape != ids.shape:
        return [[int(token) for token in row] for row in ids.tolist()]
    return [row[seen].tolist() for row, seen in zip(ids, mask.bool().cpu(), strict=True)]


class _Encoded(BaseModelOutput):  # type: ignore[misc]
    """An output without what some decoders ask of their encoder's."""

    router_logits = attention_mask = None


def tried_source(model: PreTrainedModel) -> Source:
    """What an encoder might give for one row: random numbers, as trials are of the decoder."""
    config = getattr(model.get_encoder(), "config", model.config).get_text_config()
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(1, _TRIED_LENGTH, config.hidden_size, generator=draws)
    return {"encoder_outputs": _Encoded(last_hidden_state=states.to(model.device, model.dtype))}
