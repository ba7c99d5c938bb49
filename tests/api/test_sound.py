"""Prompts with sound, and a second image after a cache: texts or errors equal `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, VoxtralConfig, VoxtralForConditionalGeneration

import lookahead
from lookahead import LookaheadConfig, UnsupportedArgumentError
from lookahead.backends.transformers.miniature import VOCABULARY
from tiny.families import build
from tiny.images import IMAGE_TOKEN, image_prompt
from tiny.variant import Variant

TEXT = [5, 6, 7, 8, 9, 10, 11, 6, 7, 8, 9, 10]
SOUND_TOKEN = VOCABULARY - 2
FRAMES = 32


@pytest.fixture(scope="module")
def hearing() -> PreTrainedModel:
    """A tiny Voxtral for spectra of `FRAMES` frames."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    audio = {
        **sizes,
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_mel_bins": 8,
        "max_source_positions": FRAMES // 2,
    }
    text = {**sizes, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
    config = VoxtralConfig(
        audio_config={"model_type": "voxtral_encoder", **audio},
        text_config={"model_type": "llama", **text},
        audio_token_id=SOUND_TOKEN,
    )
    torch.manual_seed(0)
    model = VoxtralForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # otherwise texts are equal, or repeat one token
    return model


def heard(model: PreTrainedModel) -> dict[str, Any]:
    spectrum = torch.randn(1, 8, FRAMES, generator=torch.Generator().manual_seed(0))
    count = model.get_audio_features(spectrum, return_dict=True).pooler_output.shape[:-1].numel()
    ids = torch.tensor([[5, *[SOUND_TOKEN] * count, *TEXT, *TEXT]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": spectrum}


@pytest.mark.parametrize("sampled", [False, True])
def test_texts_about_a_sound_equal_generate(hearing: PreTrainedModel, sampled: bool) -> None:
    inputs = heard(hearing)
    texts = []
    for generate in (type(hearing).generate, lookahead.generate):
        torch.manual_seed(3)
        texts.append(generate(hearing, **inputs, max_new_tokens=24, do_sample=sampled, suppress_tokens=[SOUND_TOKEN]))
    assert torch.equal(*texts)
    with torch.no_grad():
        other = inputs | {"input_features": -inputs["input_features"]}
        change = hearing(**inputs).logits[:, -1] - hearing(**other).logits[:, -1]
    assert float(change.abs().max()) > 1e-3  # the sound matters


def test_a_sound_is_listened_to_once_and_steps_are_saved(hearing: PreTrainedModel) -> None:
    inputs = heard(hearing)
    listened: list[int] = []
    tower = next(module for name, module in hearing.named_modules() if name.endswith("audio_tower"))
    handle = tower.register_forward_hook(lambda *_: listened.append(1))
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    try:
        output = lookahead.generate(hearing, **inputs, lookahead_config=LookaheadConfig(step_budget=8), **options)
    finally:
        handle.remove()
    assert len(listened) == 1
    assert output.statistics.tokens > output.statistics.steps


def test_a_sound_with_invariant_passes_is_refused(hearing: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedArgumentError, match="input_features"):
        lookahead.generate(
            hearing, **heard(hearing), lookahead_config=LookaheadConfig(invariant=True), max_new_tokens=2
        )


@pytest.mark.parametrize("family", ["llava/multimodal", "gemma3"])
def test_a_second_image_behind_a_cache(family: str) -> None:
    model = build(family, Variant(window=64), "sdpa")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options["suppress_tokens"] = [IMAGE_TOKEN]
    texts = []
    for generate in (type(model).generate, lookahead.generate):
        first = generate(model, **image_prompt(model, [TEXT], 0), **options)
        later = image_prompt(model, [TEXT[::-1]], 5)
        ids = torch.cat([first.sequences, later["input_ids"]], dim=1)
        later |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in later:
            later["token_type_ids"] = (ids == IMAGE_TOKEN).long()
        texts.append(generate(model, **later, past_key_values=first.past_key_values, **options).sequences)
    assert torch.equal(*texts)
