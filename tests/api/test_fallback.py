"""With fallback="plain" transformers decodes refused models and arguments, with a warning that gives the reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from compared.settings import Recorder
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, LookaheadWarning, UnsupportedModelError
from model_zoo import build as zoo
from tiny.families import build
from tiny.images import cut_in_image, image_prompt
from tiny.variant import Variant

PLAIN = LookaheadConfig(fallback="plain")
KINDS = ["mamba", "prophetnet", "recurrent_gemma"]


def ids(tokens: int = 14, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 70, (1, tokens), generator=torch.Generator().manual_seed(seed))


def refused_kind(family: str) -> PreTrainedModel:
    """Return a model of a refused family, or a Mamba model with layers that cannot be replaced."""
    model = build(family, Variant(), "sdpa")
    if family == "mamba":
        model.backbone.layers[0].forward = model.backbone.layers[0].forward
    return model


def refused() -> PreTrainedModel:
    """Return a model that supports trees but is refused for its kind."""
    model = zoo("llama")
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.prepare_inputs_for_generation = partial(type(copy).prepare_inputs_for_generation, copy)
    return copy


@pytest.mark.parametrize("family", KINDS)
def test_texts_equal_generate(family: str) -> None:
    model = refused_kind(family)
    with pytest.raises(UnsupportedModelError):
        lookahead.generate(model, ids(), max_new_tokens=4)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"num_beams": 2}):
        torch.manual_seed(3)
        expected = model.generate(ids(), max_new_tokens=20, **options)
        torch.manual_seed(3)
        with pytest.warns(LookaheadWarning, match="without drafts"):
            output = lookahead.generate(model, ids(), lookahead_config=PLAIN, max_new_tokens=20, **options)
        assert torch.equal(output, expected)


def test_engines_run_them_without_drafts() -> None:
    model = refused_kind("mamba")
    with pytest.warns(LookaheadWarning, match="without drafts"):
        engine = Engine(model, PLAIN, prompt_tokens=3)
    prompts = [ids(tokens, tokens) for tokens in (17, 5, 11)]
    handles = [engine.submit(prompt, max_new_tokens=15, do_sample=False) for prompt in prompts]
    engine.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert torch.equal(handle.result(), model.generate(prompt, max_new_tokens=15, do_sample=False))


def test_an_engine_says_why_it_cannot() -> None:
    """RecurrentGemma keeps its state in the model, so rows in one step would overwrite each other's."""
    with pytest.raises(UnsupportedModelError, match="running state.*Nor.*fallback='plain'"):
        Engine(build("recurrent_gemma", Variant(), "sdpa"), PLAIN)


def test_attached_models_decode_plainly() -> None:
    model = refused()
    with pytest.warns(LookaheadWarning, match="prepare_inputs_for_generation of its own"):
        lookahead.attach(model, PLAIN)
    expected = type(model).generate(model, ids(), max_new_tokens=9, do_sample=False)
    with pytest.warns(LookaheadWarning):
        output = model.generate(ids(), max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert (output.statistics.steps, output.statistics.tokens) == (9, 9)
    lookahead.detach(model)


def test_custom_generate_samples_the_tokens_of_generate() -> None:
    model, custom = refused(), partial(lookahead.generate, lookahead_config=PLAIN)
    torch.manual_seed(1)
    expected = model.generate(ids(), max_new_tokens=9, do_sample=True)
    torch.manual_seed(1)
    with pytest.warns(LookaheadWarning):
        assert torch.equal(model.generate(ids(), max_new_tokens=9, do_sample=True, custom_generate=custom), expected)


def test_arguments_that_are_not_supported() -> None:
    model = zoo("llama")
    expected = model.generate(ids(), max_new_tokens=9, num_beams=3)
    with pytest.warns(LookaheadWarning, match="num_beams=3"):
        output = lookahead.generate(model, ids(), lookahead_config=PLAIN, max_new_tokens=9, num_beams=3)
    assert torch.equal(output, expected)
    with pytest.raises(InvalidArgumentError, match="empty prompt"):  # an impossible call is still an error
        lookahead.generate(model, ids(0), lookahead_config=PLAIN, max_new_tokens=9)


def test_streamers_get_every_value_once() -> None:
    """Even if the refusal comes after the first pass, as for a prompt that ends inside of an image."""
    model, plain, ours = build("qwen2_5_vl/multimodal", Variant(), "sdpa"), Recorder(), Recorder()
    inputs = cut_in_image(image_prompt(model, [[5, 6, 7, 8]], 0))
    expected = model.generate(**inputs, max_new_tokens=9, do_sample=False, streamer=plain)
    with pytest.warns(LookaheadWarning, match="inside of an image"):
        output = lookahead.generate(
            model, **inputs, lookahead_config=PLAIN, max_new_tokens=9, do_sample=False, streamer=ours
        )
    assert torch.equal(output, expected)
    assert ours.values == plain.values


def test_a_refusal_after_the_first_token_stands() -> None:
    """Streamed tokens cannot be undone, so there is no fallback."""

    def refuse(record: lookahead.StepRecord) -> None:
        raise UnsupportedModelError("model=Llama cannot go on")

    with pytest.raises(UnsupportedModelError, match="cannot go on"):
        lookahead.generate(zoo("llama"), ids(), lookahead_config=PLAIN, max_new_tokens=9, on_step=refuse)


def test_supported_models_draft_as_before() -> None:
    output = lookahead.generate(
        zoo("llama"),
        ids().repeat(1, 3),
        lookahead_config=LookaheadConfig(fallback="plain", step_budget=8),
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert max(output.statistics.nodes_per_step) > 1


def test_invariant_passes_cannot_fall_back() -> None:
    with pytest.raises(InvalidArgumentError, match="fallback='plain'.*invariant=True"):
        LookaheadConfig(fallback="plain", invariant=True)
    with pytest.raises(InvalidArgumentError, match="fallback='none'.*refuse, plain"):
        LookaheadConfig(fallback="none")
