"""Weights of tiny random models, under which attention matters and near-ties are rare; see `model_zoo`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tiny.encoder_decoders import is_encoder_decoder, read_by
from tiny.variant import Variant


@torch.no_grad()
def draw_weights(model: PreTrainedModel, variant: Variant) -> None:
    """Give every parameter of `model` a value that depends on nothing but `variant`.

    Args:
        model: Its parameters may hold anything, uninitialised memory included, as long as that is NaN.
        variant: Seed and spreads; that of the logits holds as far as the model has a projection to scale.
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
                parameter.copy_(_middle(name, parameter) + 0.1 * noise)
            else:
                parameter.copy_(1.3 * noise / _fan_in(module, parameter) ** 0.5)
        for name, buffer in module.named_buffers(recurse=False):
            # Of routers, learned in training without a gradient; that of OpenAI GPT is a mask.
            if "bias" in name and buffer.is_floating_point() and buffer.dim() < 4:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=random))
    _scale_logits(model, random, variant)


def _middle(name: str, parameter: Tensor) -> float:
    """What a vector stays near: its initial value, if it has one value that is not odd."""
    if "bias" in name or "sink" in name or not parameter.numel():
        return 0.0
    first = float(parameter.flatten()[0])
    return first if math.isfinite(first) and abs(first) <= 4 and bool((parameter == first).all()) else 1.0


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
    for _ in range(3):  # more than once, as a soft cap on the logits is not linear
        deviation = float(model(**arguments, use_cache=False).logits.float().std())
        if not math.isfinite(deviation) or deviation == 0:
            raise ValueError("the logits are not finite, or all the same")
        if weight is None:
            return
        weight.mul_(min(max(variant.spread / deviation, 1e-3), 1e3))
