"""Classes with image input, used with only text."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import lookahead
from lookahead import LookaheadConfig
from quick import diagonal

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_heads": 2, "depth": 1}


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    text = {**TEXT, "head_dim": 16, "sliding_window": 12, "layer_types": layers}
    vision = {**TOWER, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96)
    )


def qwen2_5_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**TEXT, "rope_parameters": rope}
    vision = {**TOWER, "out_hidden_size": 64, "patch_size": 14}
    tokens = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))


@pytest.mark.parametrize(("maker", "rows"), diagonal([gemma3, qwen2_5_vl], [1, 3]))
def test_text_without_images_is_that_of_generate(maker, rows: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = maker().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    ids = torch.randint(3, 90, (rows, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **options)
    assert len(set(expected[0].tolist())) > 8
    for config in (LookaheadConfig(), LookaheadConfig(preset="paper")):
        assert torch.equal(lookahead.generate(model, ids, lookahead_config=config, **options), expected)
