"""transformers' tests of its decoding methods, for lookahead decoding through transformers' own entry point.

Each test has the name of a test in `GenerationTesterMixin`, `GenerationIntegrationTests` or the streamer tests of
transformers, and checks the same property of `model.generate(..., custom_generate=lookahead.generate)` against plain
decoding. If that entry point does not pass an argument on, the test calls `lookahead.generate`. Tests that do not
apply are omitted: encoder-decoders, other inputs than text, compilation. One test covers all refused methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig, LookaheadError, LookaheadOutput
from model_zoo import ARCHITECTURES, VOCAB_SIZE, build
from quick import diagonal

SMALL = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True)
PLAIN_STEPS = LookaheadConfig(preset="autoregressive")
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
PROCESSED = {"bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "remove_invalid_values": True}
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
NAMES = ["llama", "gpt2", "mistral_sliding", "gemma3", "mixtral"]
"""Rotary and learned positions, sliding, mixed and expert layers."""

each_model = pytest.mark.parametrize("name", NAMES)


def ours(model: PreTrainedModel, ids: torch.Tensor | None = None, **options: Any) -> Any:
    """Lookahead decoding through transformers' entry point."""
    options = {"lookahead_config": SMALL, **options}
    return model.generate(ids, custom_generate=lookahead.generate, **options)


def in_function(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    """Lookahead decoding through the entry point that accepts streamers and tokenizers."""
    return lookahead.generate(model, ids, lookahead_config=SMALL, **options)


def check_scores(output: Any, plain: Any) -> None:
    """Check that texts are equal, and scores and logits up to rounding."""
    assert torch.equal(output.sequences, plain.sequences)
    for name in ("scores", "logits"):
        got, expected = getattr(output, name), getattr(plain, name)
        assert (got is None) == (expected is None)
        for one, other in zip(got or (), expected or (), strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@contextmanager
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log of transformers, which does not propagate to the root logger."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    caplog.clear()
    try:
        yield caplog
    finally:
        logger.removeHandler(caplog.handler)


# --- decoding methods and their outputs ---------------------------------------------------------------------------


@each_model
def test_greedy_text_with_processors_is_that_of_generate(name: str) -> None:
    model = build(name)
    output = ours(model, PROMPT, **GREEDY, **PROCESSED)
    assert output.shape == (1, 24)
    assert torch.equal(output, model.generate(PROMPT, **GREEDY, **PROCESSED))


@each_model
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generate_dict_outputs(name: str, use_cache: bool) -> None:
    model = build(name)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "use_cache": use_cache}
    plain = model.generate(PROMPT, **GREEDY, **PROCESSED, **options)
    output = ours(model, PROMPT, **GREEDY, **PROCESSED, **options)
    assert isinstance(output, LookaheadOutput)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    check_scores(output, plain)
    assert len(output.scores) == len(output.logits) == 12
    assert all(scores.shape == (1, VOCAB_SIZE) for scores in output.scores)
    assert (output.past_key_values is None) == (not use_cache)


@each_model
def test_sampled_text_with_processors_is_that_of_generate(name: str) -> None:
    model = build(name)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = model.generate(PROMPT, **SAMPLED, **PROCESSED)
        torch.manual_seed(seed)
        assert torch.equal(ours(model, PROMPT, **SAMPLED, **PROCESSED), expected)
    assert ours(model, PROMPT, num_return_sequences=2, **SAMPLED, **PROCESSED).shape == (2, 24)


def test_sample_generate_dict_output(llama: PreTrainedModel) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **SAMPLED, **PROCESSED}
    torch.manual_seed(0)
    plain = llama.generate(PROMPT, **options)
    torch.manual_seed(0)
    check_scores(ours(llama, PROMPT, **options), plain)
    several = ours(llama, PROMPT, num_return_sequences=2, **options)
    assert several.sequences.shape == (2, 24)
    assert all(scores.shape == (2, VOCAB_SIZE) for scores in several.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"num_beams": 2}, "num_beams", id="test_beam_search_generate"),
        pytest.param({"num_beams": 2, "do_sample": True}, "num_beams", id="test_beam_sample_generate"),
        pytest.param({"num_beams": 2, "num_beam_groups": 2}, "num_beams", id="test_group_beam_search_generate"),
        pytest.param({"force_words_ids": [[5]]}, "force_words_ids", id="test_constrained_beam_search_generate"),
        pytest.param({"penalty_alpha": 0.6, "top_k": 5}, "penalty_alpha", id="test_contrastive_generate"),
        pytest.param({"dola_layers": "low"}, "dola_layers", id="test_dola_decoding_sample"),
        pytest.param({"prompt_lookup_num_tokens": 3}, "prompt_lookup", id="test_prompt_lookup_decoding"),
        pytest.param({"assistant_early_exit": 1}, "assistant_early_exit", id="test_assisted_decoding_early_exit"),
        pytest.param({"cache_implementation": "static"}, "cache_impl", id="test_generate_with_static_cache"),
        pytest.param({"inputs_embeds": torch.zeros(1, 12, 48)}, "embeds", id="test_generate_from_inputs_embeds"),
        pytest.param({"output_attentions": True}, "output_attentions", id="test_attention_outputs"),
        pytest.param({"output_hidden_states": True}, "output_hidden_states", id="test_hidden_states_output"),
    ],
)
def test_unsupported_ways_of_decoding_are_refused(
    options: dict[str, Any], message: str, llama: PreTrainedModel
) -> None:
    with pytest.raises(LookaheadError, match=message):
        ours(llama, PROMPT, **{**GREEDY, "return_dict_in_generate": True, **options})


def test_transition_scores_greedy_search(llama: PreTrainedModel) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    transitions = []
    for output in (llama.generate(PROMPT, **options), ours(llama, PROMPT, **options)):
        scores = llama.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        assert scores.shape == (1, 12)
        transitions.append(scores)
    torch.testing.assert_close(*transitions, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_eager_matches_sdpa_generate(name: str) -> None:
    texts = [ours(build(name, attention=attention), PROMPT, **GREEDY) for attention in ("eager", "sdpa")]
    assert torch.equal(*texts)


# --- prompts ------------------------------------------------------------------------------------------------------


@each_model
def test_left_padding_compatibility(name: str) -> None:
    """Padding on the left changes neither the first token's logits nor the text."""
    model = build(name)
    padding = torch.zeros(1, 9, dtype=torch.long)
    ids, mask = torch.cat([padding, PROMPT], dim=1), torch.cat([padding, torch.ones_like(PROMPT)], dim=1)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    bare, padded = ours(model, PROMPT, **options), ours(model, ids, attention_mask=mask, **options)
    assert torch.equal(padded.sequences[:, 9:], bare.sequences)
    torch.testing.assert_close(padded.logits[0], bare.logits[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(padded.sequences, model.generate(ids, attention_mask=mask, **GREEDY))


@each_model
def test_generate_with_and_without_position_ids(name: str) -> None:
    model = build(name)
    mask = (torch.arange(12) >= 4).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    without = ours(model, PROMPT, attention_mask=mask, **GREEDY)
    assert torch.equal(ours(model, PROMPT, attention_mask=mask, position_ids=positions, **GREEDY), without)


@pytest.mark.parametrize("pad_token_id", [3, 60])
def test_generate_without_attention_mask(pad_token_id: int, llama: PreTrainedModel) -> None:
    """transformers hides padding tokens in the prompt without a message; without a padding token it hides none."""
    ids = torch.cat([torch.full((1, 2), 3), PROMPT[:, 1:6]], dim=1)
    expected = llama.generate(ids, pad_token_id=pad_token_id, **GREEDY)
    assert torch.equal(ours(llama, ids, pad_token_id=pad_token_id, **GREEDY), expected)
    unmasked = llama.generate(ids, **GREEDY)
    assert torch.equal(expected, unmasked) == (pad_token_id == 60)


def test_generate_without_input_ids(llama: PreTrainedModel) -> None:
    expected = llama.generate(bos_token_id=5, **GREEDY)
    assert expected[0, 0] == 5
    assert torch.equal(ours(llama, bos_token_id=5, **GREEDY), expected)
    with pytest.raises(ValueError, match="bos_token_id"):
        ours(llama, **GREEDY)


def test_generate_input_ids_as_kwarg(llama: PreTrainedModel) -> None:
    options = {"custom_generate": lookahead.generate, "lookahead_config": SMALL, **GREEDY}
    expected = llama.generate(PROMPT, **GREEDY)
    assert torch.equal(llama.generate(input_ids=PROMPT, **options), expected)
    assert torch.equal(llama.generate(inputs=PROMPT, **options), expected)
    with pytest.raises(ValueError, match="input_ids"):
        llama.generate(PROMPT, input_ids=PROMPT, **options)


def test_validate_generation_inputs(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="foo"):
        ours(llama, PROMPT, foo="bar", **GREEDY)


def test_generate_methods_with_logits_to_keep(llama: PreTrainedModel) -> None:
    expected = ours(llama, PROMPT, **GREEDY)
    assert torch.equal(ours(llama, PROMPT, logits_to_keep=0, **GREEDY), expected)


@each_model
@pytest.mark.parametrize("size", [1, 5, 12, 40])
def test_a_prompt_in_chunks_gives_the_same_text_with_a_pass_per_chunk(name: str, size: int) -> None:
    model = build(name)
    options = {**GREEDY, "prefill_chunk_size": size, "return_dict_in_generate": True}
    output = ours(model, PROMPT, **options)
    assert torch.equal(output.sequences, model.generate(PROMPT, **GREEDY))
    assert output.statistics.prefill_passes == -(-12 // size) - 1


# --- where the text ends ------------------------------------------------------------------------------------------


def test_max_new_tokens_decoder_only(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """`max_new_tokens` overrides `max_length` with transformers' warning; a prompt of full length is its error."""
    assert ours(llama, PROMPT, max_new_tokens=3).shape == (1, 15)
    assert ours(llama, PROMPT, max_length=20).shape == (1, 20)
    with transformers_log(caplog):
        assert ours(llama, PROMPT, max_new_tokens=10, max_length=20).shape == (1, 22)
    assert "`max_new_tokens` will take precedence" in caplog.text
    with pytest.raises(ValueError, match="max_length"):
        ours(llama, PROMPT, max_length=12)


def test_default_max_length_warning(llama: PreTrainedModel, recwarn: pytest.WarningsRecorder) -> None:
    ours(llama, PROMPT, max_length=20)
    assert not [warning for warning in recwarn if "max_length" in str(warning.message)]
    with pytest.warns(UserWarning, match="max_length"):
        assert ours(llama, PROMPT).shape == (1, 32)


def test_min_length_warnings(llama: PreTrainedModel) -> None:
    for options in ({"min_length": 40}, {"min_new_tokens": 30}):
        with pytest.warns(UserWarning, match="Unfeasible length"):
            ours(llama, PROMPT, eos_token_id=5, pad_token_id=0, **options, **GREEDY)


def test_eos_token_id_int_and_list_greedy_search(llama: PreTrainedModel) -> None:
    text = llama.generate(PROMPT, **GREEDY)[0, 12:].tolist()
    for eos in (text[4], [text[4]], [70, text[4]], torch.tensor([text[4], 70])):
        expected = llama.generate(PROMPT, eos_token_id=eos, pad_token_id=0, **GREEDY)
        assert expected.shape[1] == 12 + text.index(text[4]) + 1
        assert torch.equal(ours(llama, PROMPT, eos_token_id=eos, pad_token_id=0, **GREEDY), expected)


def test_eos_token_that_never_comes(llama: PreTrainedModel) -> None:
    """transformers' own tests use -1 for no end token."""
    batch = torch.cat([PROMPT, PROMPT.flip(1)])
    expected = llama.generate(batch, eos_token_id=-1, pad_token_id=-1, **GREEDY)
    assert torch.equal(ours(llama, batch, eos_token_id=-1, pad_token_id=-1, **GREEDY), expected)


@pytest.mark.parametrize("options", [{"min_length": 21}, {"min_new_tokens": 9}])
def test_no_text_ends_before_its_minimum_length(options: dict[str, int], llama: PreTrainedModel) -> None:
    text = llama.generate(PROMPT, **GREEDY)[0, 12:].tolist()
    options = {**options, **GREEDY, "eos_token_id": text[2], "pad_token_id": 0}
    expected = llama.generate(PROMPT, **options)
    assert expected.shape[1] >= 21
    assert torch.equal(ours(llama, PROMPT, **options), expected)


def test_custom_stopping_criteria(llama: PreTrainedModel) -> None:
    class Short(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 15] * len(input_ids))

    for criteria in ([Short()], StoppingCriteriaList([Short()]), StoppingCriteriaList([MaxLengthCriteria(15)])):
        assert ours(llama, PROMPT, stopping_criteria=criteria, max_length=22).shape == (1, 15)


def test_criteria_that_look_at_the_scores(llama: PreTrainedModel) -> None:
    class Sure(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: object) -> torch.Tensor:
            return scores[-1].softmax(-1).amax(-1) > 0.9

    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [Sure()]}
    expected = llama.generate(PROMPT, **options)
    assert expected.sequences.shape[1] < 24
    check_scores(ours(llama, PROMPT, **options), expected)


def test_a_given_eos_criterion_replaces_the_one_of_eos_token_id(llama: PreTrainedModel) -> None:
    """As in transformers, a passed criterion replaces the default one."""
    text = llama.generate(PROMPT, **GREEDY)[0, 12:].tolist()
    options = {"eos_token_id": text[5], "pad_token_id": 0, "stopping_criteria": [EosTokenCriteria(text[2])], **GREEDY}
    expected = llama.generate(PROMPT, **options)
    assert expected.shape[1] == 15
    assert torch.equal(ours(llama, PROMPT, **options), expected)


# --- processors ---------------------------------------------------------------------------------------------------


class OnlyFive(LogitsProcessor):
    """Change the scores in place, as processors may."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:] = -torch.inf
        scores[:, 5] = 0.0
        return scores


def test_custom_logits_processor(llama: PreTrainedModel) -> None:
    """A passed processor replaces transformers' own processor of the same class."""
    text = llama.generate(PROMPT, **GREEDY)[0, 12:].tolist()
    options = {"min_length": 14, "eos_token_id": text[2], "pad_token_id": 0, **GREEDY}
    limits = LogitsProcessorList([MinLengthLogitsProcessor(min_length=20, eos_token_id=text[2])])
    expected = llama.generate(PROMPT, logits_processor=limits, **options)
    assert expected.shape[1] >= 20 > llama.generate(PROMPT, **options).shape[1]
    assert torch.equal(ours(llama, PROMPT, logits_processor=limits, **options), expected)


def test_logits_processor_not_inplace(llama: PreTrainedModel) -> None:
    """Returned logits are the model's, even if a processor changes them in place."""
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    output = ours(llama, PROMPT, logits_processor=[OnlyFive()], **options)
    assert output.sequences[0, 12:].tolist() == [5] * 12
    bare = ours(llama, PROMPT, logits_processor=[lambda _, scores: scores.clone().fill_(0.0)], **options)
    torch.testing.assert_close(output.logits[0], bare.logits[0])
    assert not torch.allclose(output.logits[0], output.scores[0])


def test_prefix_allowed_tokens_fn(llama: PreTrainedModel) -> None:
    batch = torch.cat([PROMPT, PROMPT.flip(1)])
    seen: list[int] = []

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        seen.append(row)
        return [10 + row, 20 + row, 30 + row + int(text[-1]) % 5]

    expected = llama.generate(batch, prefix_allowed_tokens_fn=allowed, **GREEDY)
    assert set(seen) == {0, 1}
    assert torch.equal(ours(llama, batch, prefix_allowed_tokens_fn=allowed, **GREEDY), expected)


def test_special_tokens_fall_back_to_model_default(llama: PreTrainedModel) -> None:
    text = llama.generate(PROMPT, **GREEDY)[0, 12:].tolist()
    try:
        llama.generation_config.eos_token_id, llama.generation_config.pad_token_id = text[3], 0
        for options in (GREEDY, {"generation_config": GenerationConfig(**GREEDY)}, {**GREEDY, "eos_token_id": 70}):
            expected = llama.generate(PROMPT, **options)
            assert expected.shape[1] == (24 if "eos_token_id" in options else 16)
            assert torch.equal(ours(llama, PROMPT, **options), expected)
    finally:
        llama.generation_config.eos_token_id = llama.generation_config.pad_token_id = None


# --- caches -------------------------------------------------------------------------------------------------------

CACHED = {**GREEDY, "return_dict_in_generate": True}
CACHE_MODELS = ["llama", "gpt2", "mistral_sliding", "gemma3", "phi3_long_rope", "deepseek_v3"]
MAKERS: dict[str, Callable[[PreTrainedModel], Cache | None]] = {
    "none": lambda model: None,
    "bare": lambda model: DynamicCache(),
    "configured": lambda model: DynamicCache(config=model.config),
}


def plainly(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(ids, **options)


@contextmanager
def widths(model: PreTrainedModel) -> Iterator[list[int]]:
    """Number of tokens in each forward pass, without the checks before a model's first call."""
    ours(model, PROMPT, max_new_tokens=1)
    seen: list[int] = []

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        seen.append((args[0] if ids is None else ids).shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def visible(cache: Cache, layer: int) -> torch.Tensor:
    """Return the keys of a layer, without unused capacity."""
    return cache.layers[layer].keys[:, :, : cache.get_seq_length()]


def test_past_key_values_format(llama: PreTrainedModel) -> None:
    plain, output = plainly(llama, PROMPT, **CACHED), ours(llama, PROMPT, **CACHED)
    mine, theirs = output.past_key_values, plain.past_key_values
    assert isinstance(mine, Cache)
    assert len(mine) == len(theirs) == llama.config.num_hidden_layers
    assert mine.get_seq_length() == theirs.get_seq_length() == 23
    for layer in range(len(mine)):
        torch.testing.assert_close(visible(mine, layer), visible(theirs, layer), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "maker", "calls"), diagonal(CACHE_MODELS, MAKERS, [(ours, ours), (ours, plainly), (plainly, ours)])
)
def test_generate_continue_from_past_key_values(name: str, maker: str, calls: tuple[Callable[..., Any], ...]) -> None:
    """Two calls equal one call, for every decoder and every origin of the cache."""
    (first, second), model = calls, build(name)
    expected = plainly(model, PROMPT, **CACHED)
    cache = MAKERS[maker](model)
    started = first(model, PROMPT, past_key_values=cache, **{**CACHED, "max_new_tokens": 3})
    assert cache is None or started.past_key_values is cache
    finished = second(
        model, started.sequences, past_key_values=started.past_key_values, **{**CACHED, "max_new_tokens": 9}
    )
    assert torch.equal(finished.sequences, expected.sequences)
    assert finished.past_key_values is started.past_key_values
    assert finished.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@pytest.mark.parametrize("filled_by", [ours, plainly], ids=["empty", "filled"])
def test_a_cache_with_layers_that_hold_nothing(filled_by: Callable[..., Any]) -> None:
    model = sharing_model()
    cache = DynamicCache(config=model.config)
    started = filled_by(model, PROMPT, past_key_values=cache, **{**CACHED, "max_new_tokens": 5})
    expected = plainly(model, PROMPT, **GREEDY)
    for decode in (ours, plainly):
        text = decode(model, started.sequences, past_key_values=cache, **{**GREEDY, "max_new_tokens": 7})
        assert torch.equal(text, expected)
        cache.crop(-7)  # back to the first text without its last token


def sharing_model() -> PreTrainedModel:
    """Return a tiny model with shared keys and values: its last layers read the first layers' ones."""
    layers = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=layers,
        sliding_window=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("name", "maker"), diagonal(["llama", "mistral_sliding"], MAKERS))
def test_only_new_tokens_are_prefilled_over_several_turns(name: str, maker: str) -> None:
    model = build(name)
    cache, text = MAKERS[maker](model), PROMPT
    fresh = PROMPT.shape[1]
    for turn in range(4):
        expected = plainly(model, text, **GREEDY)
        with widths(model) as sent:
            ours(model, PROMPT, lookahead_config=PLAIN_STEPS, **GREEDY)  # repeats the model's trial with the hook
            sent.clear()
            output = ours(model, text, past_key_values=cache, lookahead_config=PLAIN_STEPS, **CACHED)
        assert torch.equal(output.sequences, expected)
        assert sent == [fresh] + [1] * 11, f"turn {turn}"
        assert output.statistics.steps == 12
        cache = output.past_key_values
        text = torch.cat([output.sequences, torch.tensor([[5 + turn, 6, 7]])], dim=1)
        fresh = 4  # the three new tokens, and the last token of the text before


@pytest.mark.parametrize(("count", "filled_by"), diagonal([2, 40], [ours, plainly]))
def test_a_cache_takes_only_the_new_tokens(filled_by: Callable[..., Any], count: int, llama: PreTrainedModel) -> None:
    """The prompt may omit the cached tokens, if the attention mask includes them."""
    started = filled_by(llama, PROMPT, **CACHED)
    new = torch.cat([started.sequences[:, -1:], torch.arange(count)[None] % VOCAB_SIZE], dim=1)
    text = torch.cat([started.sequences[:, :-1], new], dim=1)
    mask = torch.ones_like(text)
    expected = plainly(llama, text, **GREEDY)[:, text.shape[1] :]
    output = ours(llama, new, attention_mask=mask, past_key_values=started.past_key_values, **GREEDY)
    assert torch.equal(output[:, new.shape[1] :], expected)


def test_a_cache_of_a_padded_prompt_takes_only_the_new_tokens(llama: PreTrainedModel) -> None:
    """A mask with hidden tokens reaches us, and gives the same text."""
    ids, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1), torch.ones(1, 15, dtype=torch.long)
    mask[:, :3] = 0
    started = ours(llama, ids, attention_mask=mask, **CACHED)
    new = torch.cat([started.sequences[:, -1:], torch.tensor([[5, 6, 7]])], dim=1)
    text = torch.cat([started.sequences[:, 3:-1], new], dim=1)
    longer = torch.cat([mask, torch.ones(1, 15, dtype=torch.long)], dim=1)
    expected = plainly(llama, text, **GREEDY)[:, text.shape[1] :]
    output = ours(llama, new, attention_mask=longer, past_key_values=started.past_key_values, **GREEDY)
    assert torch.equal(output[:, new.shape[1] :], expected)


def test_the_cache_of_a_padded_batch_can_be_continued(llama: PreTrainedModel) -> None:
    """For every decoder of both calls: hidden tokens and padding have columns in the cache."""
    ids = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), PROMPT[:, :8]], dim=1), PROMPT])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    longer = torch.cat([mask, torch.ones(2, 12, dtype=torch.long)], dim=1)
    alone = plainly(llama, ids, attention_mask=mask, **GREEDY)
    # The first row ends early and is padded.
    end = next(token for token in alone[0, 13:20].tolist() if token not in alone[1, 12:])
    options = {"eos_token_id": end, "pad_token_id": 1}
    text = plainly(llama, ids, attention_mask=mask, **GREEDY, **options)
    assert (text[0] == 1).sum() > (text[1] == 1).sum()
    longer = longer[:, : text.shape[1]]
    expected = plainly(llama, text, attention_mask=longer, **GREEDY)
    for first in (ours, plainly):
        for second in (ours, plainly):
            cache = DynamicCache() if first is second else None
            started = first(llama, ids, attention_mask=mask, past_key_values=cache, **CACHED, **options)
            assert torch.equal(started.sequences, text)
            again = {"attention_mask": longer, "past_key_values": started.past_key_values}
            assert torch.equal(second(llama, text, **again, **GREEDY), expected), (first, second)
            assert started.past_key_values.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize(("filled_by", "name"), diagonal([ours, plainly], ["llama", "mistral_sliding", "gpt2"]))
def test_the_cache_of_a_padded_prompt_can_be_continued(name: str, filled_by: Callable[..., Any]) -> None:
    """Several turns by both decoders, with hidden tokens before and inside the row."""
    model = build(name)
    mask = torch.ones_like(PROMPT)
    mask[:, :3] = 0
    if name != "mistral_sliding":  # its window counts hidden tokens inside the row
        mask[:, 7] = 0
    turn = filled_by(model, PROMPT, attention_mask=mask, **CACHED)
    for decode in (plainly, ours, ours, plainly, ours):
        text = torch.cat([turn.sequences, torch.tensor([[5, 6, 7]])], dim=1)
        longer = torch.cat([mask, torch.ones(1, text.shape[1] - 12, dtype=torch.long)], dim=1)
        expected = plainly(model, text, attention_mask=longer, **GREEDY)
        turn = decode(model, text, attention_mask=longer, past_key_values=turn.past_key_values, **CACHED)
        assert torch.equal(turn.sequences, expected)


def test_a_mask_that_shows_tokens_hidden_from_the_cache(llama: PreTrainedModel) -> None:
    mask = torch.ones_like(PROMPT)
    mask[:, :3] = 0
    started = ours(llama, PROMPT, attention_mask=mask, **CACHED)
    with pytest.raises(InvalidArgumentError, match="attention_mask shows tokens"):
        ours(llama, started.sequences, past_key_values=started.past_key_values, **GREEDY)


def test_returned_caches_can_be_cropped_repeated_and_read(llama: PreTrainedModel) -> None:
    """A returned cache can be cropped, repeated for several rows, and passed to the model, like any other."""
    output = ours(llama, PROMPT, **CACHED)
    cache, text = output.past_key_values, output.sequences
    cache.crop(-3)
    assert torch.equal(ours(llama, text, past_key_values=cache, **GREEDY), plainly(llama, text, **GREEDY))
    cache.batch_repeat_interleave(2)
    cache.crop(-12)
    rows = text.repeat(2, 1)
    assert torch.equal(plainly(llama, rows, past_key_values=cache, **GREEDY), plainly(llama, rows, **GREEDY))
    again = ours(llama, PROMPT, **CACHED).past_key_values
    with torch.no_grad():
        logits = llama(text[:, -1:], past_key_values=again).logits[:, -1]
        torch.testing.assert_close(logits, llama(text).logits[:, -1], atol=2e-4, rtol=1e-4)


def test_caches_longer_than_the_prompt_or_of_other_rows_are_refused(llama: PreTrainedModel) -> None:
    filled = ours(llama, PROMPT, **CACHED).past_key_values
    for ids in (PROMPT, torch.arange(30).repeat(2, 1)):
        with pytest.raises(LookaheadError, match="cache|past_key_values"):
            ours(llama, ids, past_key_values=filled, **GREEDY)
    assert filled.get_seq_length() == 23


# --- streamers ----------------------------------------------------------------------------------------------------

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]
STREAMED = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture
def prompt_and_text(demo: Demo) -> tuple[torch.Tensor, str]:
    """A prompt for the demo model, and its continuation."""
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids
    return ids, tokenizer.decode(model.generate(ids, **STREAMED)[0, ids.shape[1] :])


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamer_matches_non_streaming(
    skip_prompt: bool, demo: Demo, prompt_and_text: tuple[torch.Tensor, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = demo
    ids, text = prompt_and_text
    in_function(model, ids, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt), **STREAMED)
    assert capsys.readouterr().out == ("" if skip_prompt else "for i in") + text + "\n"


def test_iterator_streamer_matches_non_streaming(demo: Demo, prompt_and_text: tuple[torch.Tensor, str]) -> None:
    model, tokenizer = demo
    ids, text = prompt_and_text
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
    thread = Thread(target=in_function, args=(model, ids), kwargs={"streamer": streamer, **STREAMED})
    thread.start()
    assert "".join(streamer) == text
    thread.join()


def test_iterator_streamer_timeout(demo: Demo, prompt_and_text: tuple[torch.Tensor, str]) -> None:
    """Through transformers' entry point a streamer gets the prompt and nothing else, not even the end."""
    model, tokenizer = demo
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=0.01)
    ours(model, prompt_and_text[0], streamer=streamer, **STREAMED)
    with pytest.raises(Empty):
        next(iter(streamer))


def test_async_iterator_streamer_matches_non_streaming(demo: Demo, prompt_and_text: tuple[torch.Tensor, str]) -> None:
    model, tokenizer = demo
    ids, text = prompt_and_text

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
        thread = Thread(target=in_function, args=(model, ids), kwargs={"streamer": streamer, **STREAMED})
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    assert asyncio.run(read()) == text


def test_streamer_with_several_sequences(demo: Demo, prompt_and_text: tuple[torch.Tensor, str]) -> None:
    model, tokenizer = demo
    ids, _ = prompt_and_text
    for generate in (plainly, in_function):
        with pytest.raises(ValueError, match="batch size 1"):
            generate(model, ids.repeat(2, 1), streamer=TextStreamer(tokenizer), **STREAMED)


def test_a_stop_string_may_end_inside_a_token(demo: Demo, prompt_and_text: tuple[torch.Tensor, str]) -> None:
    """Tested without transformers' entry point, which passes no tokenizer on."""
    model, tokenizer = demo
    ids, text = prompt_and_text
    options = {"stop_strings": ["(le", "no such text"], "tokenizer": tokenizer, **STREAMED}
    expected = plainly(model, ids, **options)
    assert "(le" in text
    assert "(le" in tokenizer.decode(expected[0, -2:])
    assert torch.equal(in_function(model, ids, **options), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        ours(model, ids, **options)


@pytest.mark.parametrize("name", ["synced_gpus", "assistant_model", "assistant_tokenizer"])
def test_arguments_dropped_by_transformers_change_no_text(name: str, llama: PreTrainedModel) -> None:
    """transformers' entry point drops these arguments before they could be refused; the text is the same."""
    value = {"synced_gpus": True, "assistant_model": llama, "assistant_tokenizer": object()}[name]
    assert torch.equal(ours(llama, PROMPT, **{name: value}, **GREEDY), plainly(llama, PROMPT, **GREEDY))


def test_every_architecture_named_here_is_in_the_zoo() -> None:
    assert {*NAMES, *CACHE_MODELS} <= set(ARCHITECTURES)
