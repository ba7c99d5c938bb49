"""Weights of tiny random models: attention matters, and near-ties are rare (see `model_zoo`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lookahead.backends.transformers.miniature import middle
from tiny.encoder_decoders import is_encoder_decoder, read_by
from tiny.variant import Variant


@torch.no_grad()
def draw_weights(model: PreTrainedModel, variant: Variant) -> None:
    """Set every parameter of `model` to values that depend only on `variant`.

    Args:
        model: The model; its parameters may be uninitialised if they are NaN.
        variant: Seed and spreads; the spread of the logits needs a projection to scale.
    """
    random = torch.Generator().manual_seed(variant.seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
            if module is model.get_input_embeddings():
                parameter.copy_(variant.embedding_gain * noise)
            elif isinstance(module, nn.Embedding):  # learned positions
                parameter.copy_(0.3 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(middle(name, parameter) + 0.1 * noise)
            else:
                parameter.copy_(1.3 * noise / _fan_in(module, parameter) ** 0.5)
        for name, buffer in module.named_buffers(recurse=False):
            # Biases of routers, learned without a gradient; OpenAI GPT's `bias` is a mask.
            if "bias" in name and buffer.is_floating_point() and buffer.dim() < 4:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=random))
    _scale_logits(model, random, variant)


def _fan_in(module: nn.Module, parameter: Tensor) -> int:
    return parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]


def _scale_logits(model: PreTrainedModel, random: torch.Generator, variant: Variant) -> None:
    projection = model.get_output_embeddings()
    weight = getattr(projection, "weight", None)
    ids = torch.randint(1, variant.vocabulary, (2, 8), generator=random)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if is_encoder_decoder(model):
        read = read_by(model, torch.ones_like(ids) if model.main_input_name != "input_ids" else ids, ids > 0)
        arguments = {**read, "decoder_input_ids": ids}
    for _ in range(3):  # repeated, as a soft cap on the logits is not linear
        deviation = float(model(**arguments, use_cache=False).logits.float().std())
        if not math.isfinite(deviation) or deviation == 0:
            raise ValueError("the logits are not finite, or all the same")
        if weight is None:
            return
        weight.mul_(min(max(variant.spread / deviation, 1e-3), 1e3))
