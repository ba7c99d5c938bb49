"""Prompts with images of random pixels, for tiny models of any class with image input.

Classes do not declare the form of their pixels. The known forms are tried, the simplest first, until the model's own
function returns features; their number is the number of image tokens in the prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backends.transformers.miniature import VOCABULARY
from tiny.families import CannotBuild

IMAGE_TOKEN = VOCABULARY - 2
_TOKEN_NAMES = ("image_token_id", "image_token_index", "image_patch_id")
_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def images(model: PreTrainedModel, count: int, seed: int) -> tuple[dict[str, Tensor], int]:
    """Return arguments of `generate` for `count` images, and the number of image tokens of each.

    Raises:
        CannotBuild: The model has no image input, or an unknown form of it.
    """
    features = getattr(model.base_model, "get_image_features", None)
    if features is None or not any(hasattr(model.config, name) for name in _TOKEN_NAMES):
        raise CannotBuild("it has no get_image_features, or no image token")
    for name in _TOKEN_NAMES:
        if hasattr(model.config, name):
            with suppress(AttributeError):  # a read-only alias of another field
                setattr(model.config, name, IMAGE_TOKEN)
    reason = ""
    for arguments in _ways(model, count, torch.Generator().manual_seed(seed)):
        taken = {name: value for name, value in arguments.items() if name in inspect.signature(features).parameters}
        if taken.keys() != arguments.keys():
            continue
        try:
            with torch.no_grad():
                output = features(**taken, return_dict=True)
            features_ = output.last_hidden_state if output.pooler_output is None else output.pooler_output
            total = sum(
                part.shape[:-1].numel() for part in (features_ if isinstance(features_, list | tuple) else [features_])
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if total % count == 0:
            return arguments, total // count
    raise CannotBuild(" ".join(f"its images are not known here ({reason})".split())[:200])


def image_prompt(model: PreTrainedModel, rows: list[list[int]], seed: int) -> dict[str, Any]:
    """Return arguments of `generate` for `rows` of tokens, all of one length, with an image after each first token.

    Raises:
        CannotBuild: The images cannot be made.
    """
    ids = torch.tensor(rows)
    ids, mask, read = with_images(model, ids, torch.ones_like(ids), seed)
    return {"input_ids": ids, "attention_mask": mask, **read}


def cut_in_image(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt of one row that ends with its last image token."""
    ids = inputs["input_ids"]
    end = int((ids[0] == IMAGE_TOKEN).nonzero()[-1]) + 1
    return {name: value[:, :end] if value.shape == ids.shape else value for name, value in inputs.items()}


def with_images(model: PreTrainedModel, ids: Tensor, mask: Tensor, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return prompts with an image after the first token of each row, their mask, and further inputs of the model.

    Args:
        model: The model; its image token is set.
        ids: Token ids, `[rows, tokens]`.
        mask: Attention mask, `[rows, tokens]`; hidden tokens come first.
        seed: Seed of the pixels.

    Raises:
        CannotBuild: The images cannot be made.
    """
    arguments, size = images(model, len(ids), seed)
    rows = []
    for row, counted in zip(ids, mask, strict=True):
        first = int(counted.argmax()) + 1
        rows.append(torch.cat([row[:first], row.new_full((size,), IMAGE_TOKEN), row[first:]]))
    whole = torch.stack(rows)
    read: dict[str, Any] = dict(arguments)
    for name in _TYPES:
        if name in inspect.signature(model.forward).parameters:
            read[name] = (whole == IMAGE_TOKEN).long()
    hidden = (mask == 0).sum(1)
    grown = (torch.arange(whole.shape[1]) >= hidden[:, None]).long()
    return whole, grown, read


def _ways(model: PreTrainedModel, count: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    vision = getattr(model.config, "vision_config", model.config)
    size, patch = getattr(vision, "image_size", None) or 28, getattr(vision, "patch_size", None) or 14
    size = size if isinstance(size, int) else size[0]
    patch = patch if isinstance(patch, int) else patch[0]
    merge = getattr(vision, "spatial_merge_size", None) or getattr(model.config, "spatial_merge_size", None) or 2
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3

    def pixels(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    # Three-dimensional rotary positions are smaller than the number of tokens.
    height, width = 3 * merge, 2 * merge
    grid = {"image_grid_thw": torch.tensor([[1, height, width]] * count)}
    flat, total = channels * patch * patch, count * height * width
    merges = {"image_merge_sizes": torch.tensor([merge] * count)}
    for frames in dict.fromkeys((getattr(vision, "temporal_patch_size", None) or 1, 1, 2)):
        yield {"pixel_values": pixels(total, frames * flat), **grid}
        yield {"pixel_values": pixels(total, frames * flat), **grid, **merges}
    yield {"pixel_values": pixels(total, channels, patch, patch), **grid}
    yield {"pixel_values": pixels(total, merge * patch, merge * patch, channels), **grid}
    for side in dict.fromkeys((size, 2 * patch * merge, 4 * patch)):
        square = pixels(count, channels, side, side)
        sizes = {"image_sizes": torch.tensor([[side, side]] * count)}
        tiles = square[:, None].expand(-1, 3, -1, -1, -1).clone()
        yield {"pixel_values": square, **sizes}
        yield {"pixel_values": square}
        yield {"pixel_values": tiles, **sizes}
        yield {"pixel_values": square[:, None]}
        yield {"pixel_values": tiles, "pixel_attention_mask": torch.ones(count, 3, dtype=torch.bool)}
        yield {"pixel_values": square, "high_res_pixel_values": pixels(count, channels, side, side)}
    yield {"pixel_values": pixels(count, 2, patch, patch, channels)}
    yield {"pixel_values": pixels(count, 6, flat)}
    patches = (size // patch) ** 2
    shapes = torch.tensor([[size // patch] * 2] * count)
    mask = torch.ones(count, patches, dtype=torch.long)
    yield {"pixel_values": pixels(count, patches, flat), "spatial_shapes": shapes, "pixel_attention_mask": mask}
    pool = getattr(vision, "pooling_kernel_size", None) or 1
    pooled = 4 * pool * pool
    for values in (pixels(count, pooled, flat), pixels(count, pooled, pool * pool * flat)):
        yield {"pixel_values": values, "image_position_ids": _places(count, 2 * pool)}
    targets = torch.tensor([[4, 4]] * count)  # in patches, side by side
    yield {"pixel_values": pixels(1, channels, patch, count * 16 * patch), "target_sizes": targets}


def _places(count: int, side: int) -> Tensor:
    row = torch.arange(side)
    return torch.stack(torch.meshgrid(row, row, indexing="xy"), dim=-1).reshape(1, -1, 2).expand(count, -1, -1)
