"""Prompts with images: texts equal `model.generate`, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import lookahead
from lookahead import LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.backends.transformers.miniature import VOCABULARY
from quick import diagonal, quickly
from tiny.families import build
from tiny.images import IMAGE_TOKEN, cut_in_image, image_prompt, images
from tiny.variant import Variant

TREES = ["gemma3", "mistral3/multimodal", "qwen2_5_vl/multimodal", "qwen3_vl/multimodal", "llava/multimodal"]
CHAINS = ["qwen3_5/multimodal"]
TEXT = [5, 6, 7, 8, 9, 10, 11, 6, 7, 8, 9, 10]


def tiny(family: str, window: int = 12) -> PreTrainedModel:
    return build(family, Variant(window=window), "sdpa")


def both(model: PreTrainedModel, inputs: dict[str, Any], config: LookaheadConfig, **options: Any) -> tuple[Any, Any]:
    """Return the outputs of transformers and of lookahead decoding, with the same seed."""
    expected = seeded(type(model).generate, model, **inputs, **options)
    return expected, seeded(lookahead.generate, model, **inputs, lookahead_config=config, **options)


def seeded(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return call(*arguments, **options)


def all_equal(model: PreTrainedModel, inputs: dict[str, Any], configs: list[LookaheadConfig], **options: Any) -> None:
    """Check that every configuration gives the text of transformers."""
    expected = seeded(type(model).generate, model, **inputs, **options)
    for config in configs:
        output = seeded(lookahead.generate, model, **inputs, lookahead_config=config, **options)
        assert torch.equal(output, expected), config


@pytest.mark.parametrize("family", quickly([*TREES, *CHAINS], ["gemma3", "qwen2_5_vl/multimodal", *CHAINS]))
def test_texts_equal_generate(family: str) -> None:
    model = tiny(family)
    inputs = image_prompt(model, [TEXT], 0)
    presets = [LookaheadConfig(), LookaheadConfig(step_budget=16)]
    if family not in CHAINS:
        presets += [LookaheadConfig(preset="paper"), LookaheadConfig(step_budget=16, engine="static")]
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
        all_equal(model, inputs, presets, max_new_tokens=32, **options)
    mirrored = inputs | {"pixel_values": -inputs["pixel_values"]}
    with torch.no_grad():
        change = model(**inputs).logits[:, -1] - model(**mirrored).logits[:, -1]
    assert float(change.abs().max()) > 1e-3  # the model sees the image


def test_a_window_longer_than_the_text() -> None:
    model = tiny("gemma3", window=64)
    inputs = image_prompt(model, [TEXT], 0)
    expected, output = both(model, inputs, LookaheadConfig(), max_new_tokens=20, do_sample=False)
    assert torch.equal(output, expected)


def test_a_tower_of_timm() -> None:
    pytest.importorskip("timm", reason="the extra `towers` is not installed")
    model = tiny("gemma3n", window=64)
    expected, output = both(
        model, image_prompt(model, [TEXT], 0), LookaheadConfig(), max_new_tokens=12, do_sample=False
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "family", quickly(["gemma3", "qwen2_5_vl/multimodal", *CHAINS, "lfm2_vl/multimodal"], ["gemma3", *CHAINS])
)
def test_rows_with_padding(family: str) -> None:
    model = tiny(family)
    inputs = image_prompt(model, [TEXT, TEXT[::-1]], 1)
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(inputs[name], (4, 0))
    inputs["attention_mask"][0, 4] = 1
    inputs["input_ids"][0, 4] = 17
    inputs["attention_mask"][1, 3] = 1
    inputs["input_ids"][1, :4] = 19
    configs = [LookaheadConfig(step_budget=12), LookaheadConfig(step_budget=12, engine="static")]
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2}):
        all_equal(model, inputs, configs, max_new_tokens=24, pad_token_id=0, **options)


@pytest.mark.parametrize(
    "family", quickly(["llava/multimodal", "qwen2_5_vl/multimodal", *CHAINS], ["qwen2_5_vl/multimodal", *CHAINS])
)
def test_rows_with_two_images_and_one_and_none(family: str) -> None:
    """Rows in the form of a processor: padded on the left, with the pixels of all rows concatenated."""
    model = tiny(family)
    pixels, size = images(model, 3, 0)
    picture = [IMAGE_TOKEN] * size
    rows = [[7, *picture, 8, 9, *picture, *TEXT], [*TEXT, *picture, 5, 6], TEXT]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask, **pixels}
    if "mm_token_type_ids" in signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    alone = {name: value[1:2] for name, value in inputs.items() if name not in pixels} | images(model, 1, 0)[0]
    expected, output = both(model, alone, LookaheadConfig(step_budget=12), max_new_tokens=24, do_sample=False)
    assert torch.equal(output, expected)  # one row, with padding
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
        config = LookaheadConfig(step_budget=12)
        expected, output = both(model, inputs, config, max_new_tokens=24, pad_token_id=0, **options)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl/multimodal", "qwen3_5/multimodal"])
def test_an_image_is_looked_at_once_and_steps_are_saved(family: str) -> None:
    model = tiny(family)
    inputs = image_prompt(model, [2 * TEXT], 0)
    tower = next(module for name, module in model.named_modules() if name.endswith(("vision_tower", "visual")))
    looks: list[int] = []
    widths: list[int] = []
    tower.register_forward_hook(lambda *_: looks.append(1))
    text_model = model.get_decoder()
    text_model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    output = lookahead.generate(model, **inputs, lookahead_config=LookaheadConfig(step_budget=4), **options)
    assert output.statistics.tokens > output.statistics.steps
    prompt = inputs["input_ids"].shape[1]
    assert len(looks) == 1
    assert sum(width >= prompt for width in widths) == 1


@pytest.mark.parametrize(
    ("family", "makers"),
    diagonal(["gemma3", "qwen2_5_vl/multimodal", "qwen3_5/multimodal"], [(True, True), (True, False), (False, True)]),
)
def test_caches_of_image_prompts_can_be_continued(family: str, makers: tuple[bool, bool]) -> None:
    """A text about an image, and a second turn that continues from its cache."""
    model = tiny(family)
    inputs = image_prompt(model, [TEXT], 2)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    texts = []
    for turns in ((False, False), makers):
        first, second = (lookahead.generate if ours else type(model).generate for ours in turns)
        answer = first(model, **inputs, **options)
        ids = torch.cat([answer.sequences, torch.tensor([TEXT])], dim=1)
        later = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        texts.append(second(model, **later, past_key_values=answer.past_key_values, **options).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("prompt", "makers"), diagonal(["trees, images", "chains", "trees"], [(True, True), (True, False), (False, True)])
)
def test_caches_of_texts_with_positions_from_one(prompt: str, makers: tuple[bool, bool]) -> None:
    """PaliGemma runs on trees with eager attention; chains do not take a cache of two rows."""
    model = build("paligemma/multimodal", Variant(window=12), "sdpa" if prompt == "chains" else "eager")
    rows = [TEXT] if prompt == "chains" else [TEXT, TEXT[::-1]]
    inputs = image_prompt(model, rows, 2) if "images" in prompt else {"input_ids": torch.tensor(rows)}
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    texts, states = [], []
    for turns in ((False, False), makers):
        first, second = (lookahead.generate if ours else type(model).generate for ours in turns)
        answer = first(model, **inputs, **options)
        keys = answer.past_key_values.layers[0].keys.clone()
        ids = torch.cat([answer.sequences, torch.tensor(rows)], dim=1)
        later = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answer = second(model, **later, past_key_values=answer.past_key_values, **options)
        texts.append(answer.sequences)
        states.append((keys, answer.logits))
    assert torch.equal(*texts)
    torch.testing.assert_close(*states)


def test_images_work_through_every_entry_point() -> None:
    model = tiny("llava/multimodal")
    inputs = image_prompt(model, [TEXT], 0)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=lookahead.generate), expected)
    pipe = pipeline("image-text-to-text", model=model, processor=processor(model))
    pixels = numpy.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=numpy.uint8)
    call = {"images": Image.fromarray(pixels), "text": "w5 <image> w6 w7 w8 w6 w7", "max_new_tokens": 20}
    text = pipe(**call)
    lookahead.attach(model)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert pipe(**call) == text
    assert len(text[0]["generated_text"].split()) > 20


def processor(model: PreTrainedModel) -> LlavaProcessor:
    """Return a processor for the words `w0`, `w1`, ... and images of the model's small size."""
    words = {f"w{token}": token for token in range(VOCABULARY) if token != IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words | {"<image>": IMAGE_TOKEN}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = model.config.vision_config.image_size
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<image>"]),
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
    )


def test_rows_of_layers_that_select_blocks_of_keys_are_refused() -> None:
    model = tiny("qwen4_exp/multimodal")
    with pytest.raises(UnsupportedArgumentError, match="2 rows with more than tokens"):
        lookahead.generate(model, **image_prompt(model, [TEXT, TEXT], 0), max_new_tokens=4)


def test_a_prompt_that_ends_inside_of_an_image_is_refused() -> None:
    model = tiny("qwen2_5_vl/multimodal")
    inputs = cut_in_image(image_prompt(model, [TEXT], 0))
    with pytest.raises(UnsupportedModelError, match="inside of an image"):
        lookahead.generate(model, **inputs, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"lookahead_config": LookaheadConfig(invariant=True)}, "invariant=False"),
    ],
)
def test_unsupported_arguments_with_images_are_refused(options: dict[str, Any], message: str) -> None:
    model = tiny("llava/multimodal")
    with pytest.raises(UnsupportedArgumentError, match=message):
        lookahead.generate(model, **image_prompt(model, [TEXT], 0), max_new_tokens=4, **options)


class Biased(LlamaForCausalLM):  # type: ignore[misc]
    """A model with a second input in each step, which steps of only tokens would lack."""

    input_modalities = ("image", "text")

    def forward(self, input_ids: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        if bias is not None:
            outputs.logits = outputs.logits + bias
        return outputs


def test_an_input_that_counts_at_each_step_is_refused() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=96
    )
    model = Biased(config).eval()
    with pytest.raises(UnsupportedModelError, match="bias: steps of only tokens differ"):
        lookahead.generate(model, torch.tensor([TEXT]), bias=torch.randn(96), max_new_tokens=4)


def test_an_error_of_a_processor_in_the_first_step_ends_the_call() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the first token")

    model = tiny("gemma3")
    with pytest.raises(ArithmeticError, match="first"):
        lookahead.generate(model, **image_prompt(model, [TEXT], 0), logits_processor=[fails], max_new_tokens=4)
