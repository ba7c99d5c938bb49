"""Faults that only appear in long texts are found on a miniature of the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GitConfig,
    GitForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PLBartForCausalLM,
    PreTrainedModel,
    WhisperForCausalLM,
)

import lookahead
from lookahead import LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.checks import check_model
from lookahead.backends.transformers.equivalence import Equivalence, equivalence
from lookahead.backends.transformers.limits import Limits
from lookahead.backends.transformers.miniature import build_miniature, miniature_config
from model_zoo import build
from quick import diagonal, quickly
from tiny.encoder_decoders import read_by
from tiny.families import build as build_family
from tiny.variant import Variant

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PRESETS = [LookaheadConfig(), LookaheadConfig(step_budget=32), LookaheadConfig(preset="paper")]


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomised(model: PreTrainedModel, scale: float = 0.1) -> PreTrainedModel:
    """Give a model larger weights than the initial ones, so that its text depends on its context."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=random))
    return model.eval()


def assert_exact(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> None:
    expected = model.generate(ids, do_sample=False, **options)
    for config in PRESETS:
        assert torch.equal(
            lookahead.generate(model, ids, do_sample=False, lookahead_config=config, **options), expected
        )


class CountsKeys(LlamaForCausalLM):
    """A model that scales its logits by the number of keys, beyond a length in its configuration."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        output = super().forward(*args, past_key_values=past_key_values, **kwargs)
        places = cached + torch.arange(output.logits.shape[1])
        beyond = (places - self.config.sliding_window).clamp(min=0)
        output.logits = output.logits * (1 + 0.1 * beyond)[None, :, None]
        return output


def test_a_model_that_counts_keys_beyond_its_window_is_refused() -> None:
    """Short passes cannot show it: the window is 4,096 tokens long."""
    model = CountsKeys(LlamaConfig(**SIZES, sliding_window=4096)).eval()
    with pytest.raises(UnsupportedModelError, match="past every window"):
        lookahead.generate(model, prompt(5), max_new_tokens=4)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("doge", {"keep_window_size": 24, "num_key_value_heads": 2}), ("moshi", {"sliding_window": 24, "ffn_dim": 96})],
)
def test_nothing_is_drafted_where_layers_no_longer_attend_to_all_keys(family: str, sizes: dict[str, int]) -> None:
    """Doge selects among equal keys by their slots; Moshi's cache drops keys that its masks still include."""
    model = randomised(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes)).eval())
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    for tokens in (30, 8):
        output = lookahead.generate(model, prompt(tokens), lookahead_config=LookaheadConfig(step_budget=8), **options)
        assert torch.equal(output.sequences, model.generate(prompt(tokens), **options).sequences)
    nodes = output.statistics.nodes_per_step
    assert max(nodes[1:]) > 1
    assert nodes[-20:] == [1] * 20


@pytest.mark.parametrize("tokens", quickly([20, 60, 120], [60]))
def test_gpt_neo_beyond_its_local_window(tokens: int) -> None:
    """Local layers crop their masks from a table, by the indices of the keys."""
    config = GPTNeoConfig(
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        intermediate_size=96,
        window_size=40,
        max_position_embeddings=150,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = randomised(GPTNeoForCausalLM(config))
    assert_exact(model, prompt(tokens), max_new_tokens=30)
    assert_exact(model, prompt(12), max_new_tokens=20)


def test_gpt_neo_in_batches() -> None:
    config = GPTNeoConfig(
        vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["local"], 2]], window_size=40
    )
    config.bos_token_id = config.eos_token_id = None
    model = randomised(GPTNeoForCausalLM(config))
    ids = torch.cat([prompt(12), prompt(12, 1)])
    assert_exact(model, ids, max_new_tokens=20)
    with pytest.raises(UnsupportedArgumentError, match="input_ids has 2 rows"):
        lookahead.generate(model, ids, max_new_tokens=40)


@pytest.mark.parametrize("attention_chunk_size", quickly([32, 8192], [32]))
@pytest.mark.parametrize("tokens", quickly([10, 30, 60], [10, 60]))
def test_llama4_temperature_tuning(tokens: int, attention_chunk_size: int) -> None:
    """Queries of layers without RoPE are scaled by their index in the cache, in steps of `floor_scale`."""
    config = AutoConfig.for_model(
        "llama4_text",
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
        attention_chunk_size=attention_chunk_size,
        floor_scale=64,
        attn_scale=2.0,
    )
    model = randomised(AutoModelForCausalLM.from_config(config), 0.2)
    ids = prompt(tokens)
    options = {"max_new_tokens": 80, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, **options)
    for settings in PRESETS:
        output = lookahead.generate(model, ids, lookahead_config=settings, **options)
        assert torch.equal(output.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
    with pytest.raises(UnsupportedArgumentError, match="input_ids has 2 rows"):
        lookahead.generate(model, ids.repeat(2, 1), max_new_tokens=80)


@pytest.mark.exact
def test_hidden_tokens_where_a_window_counts_them() -> None:
    """Exact while the text fits into the window, refused if it may exceed it."""
    ids, mask = prompt(20), torch.ones(1, 20, dtype=torch.long)
    mask[0, 16] = 0
    for window in (None, 8, 100):
        config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window)
        model = randomised(MistralForCausalLM(config), 0.3)
        if window == 8:
            with pytest.raises(UnsupportedArgumentError, match="hides tokens between others"):
                lookahead.generate(model, ids, attention_mask=mask, max_new_tokens=40)
        else:
            assert_exact(model, ids, attention_mask=mask, max_new_tokens=40)
        mask_before = torch.ones_like(mask)
        mask_before[0, :4] = 0
        assert_exact(model, ids, attention_mask=mask_before, max_new_tokens=40)


def test_decoders_without_position_ids_take_no_padding() -> None:
    """GIT counts padding as text: single rows are exact, padded ones are refused."""
    config = GitConfig(**SIZES, vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})
    model = randomised(GitForCausalLM(config))
    ids = torch.cat([prompt(14), prompt(14, 1)])
    assert_exact(model, ids, max_new_tokens=20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(UnsupportedArgumentError, match="attention_mask hides tokens before the prompt"):
        lookahead.generate(model, ids, attention_mask=mask, max_new_tokens=20)


def test_positions_that_are_computed_do_not_end() -> None:
    """XGLM's sinusoidal table grows; GPT-2's learned table does not."""
    config = AutoConfig.for_model(
        "xglm", vocab_size=97, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=60
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = randomised(AutoModelForCausalLM.from_config(config), 0.3)
    assert not equivalence(model).holds("positions_end")
    assert_exact(model, prompt(10), max_new_tokens=90)
    assert equivalence(GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4))).holds(
        "positions_end"
    )


@pytest.mark.parametrize("end", [None, 96], ids=["no end", "an end that never comes"])
def test_the_end_of_a_table_in_a_padded_batch(end: int | None) -> None:
    """The text is complete up to the failure of plain decoding; rows have equal lengths without a pad token."""
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=48)
    config.bos_token_id = config.eos_token_id = None
    model = randomised(GPT2LMHeadModel(config))
    ids = torch.cat([prompt(12), prompt(12, 1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    settings = {} if end is None else {"eos_token_id": end, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="no position for another"):
        text = lookahead.generate(model, ids, attention_mask=mask, max_new_tokens=60, do_sample=False, **settings)
    assert text.shape[1] == (49 if end is None else 56)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=36, do_sample=False, **settings)
    assert torch.equal(text[:, :48], expected)


@pytest.mark.parametrize("tokens", quickly([40, 46, 47, 48], [46, 47]))
@pytest.mark.parametrize("attention", quickly(["sdpa", "eager"], ["sdpa"]))
def test_dynamic_rope_after_a_longer_text(tokens: int, attention: str) -> None:
    """A pass that ends before the context's last index forgets the longer text; drafts must not prevent that."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**SIZES, max_position_embeddings=48, rope_parameters=rope)
    model = randomised(LlamaForCausalLM._from_config(config, attn_implementation=attention), 0.3)
    ids = prompt(tokens)
    for config in PRESETS:
        expected = model.generate(ids, max_new_tokens=60, do_sample=False)
        expected = model.generate(ids, max_new_tokens=60, do_sample=False)  # after a longer text
        output = lookahead.generate(model, ids, max_new_tokens=60, do_sample=False, lookahead_config=config)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_without_a_cache_where_keys_are_computed_anew(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + place for place in range(8)]}
        rope |= {"original_max_position_embeddings": 48, **factors}
    context = 48 if rope_type == "dynamic" else 512
    config = LlamaConfig(**SIZES, max_position_embeddings=context, rope_parameters=rope)
    model = randomised(LlamaForCausalLM(config), 0.3)
    assert_exact(model, prompt(12), max_new_tokens=36, use_cache=False)
    with pytest.raises(UnsupportedArgumentError, match="use_cache=False"):
        lookahead.generate(model, prompt(12), max_new_tokens=100, use_cache=False)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("attention", quickly(["eager", "sdpa"], ["sdpa"]))
def test_models_with_few_tokens_are_tried_and_exact(vocabulary: int, attention: str) -> None:
    """The tokens of a trial must differ, even with a tiny vocabulary."""
    config = LlamaConfig(**{**SIZES, "vocab_size": vocabulary})
    model = randomised(LlamaForCausalLM._from_config(config, attn_implementation=attention), 0.3)
    ids = torch.zeros(1, 6, dtype=torch.long)
    for settings in PRESETS:
        output = lookahead.generate(model, ids, max_new_tokens=20, do_sample=False, lookahead_config=settings)
        assert torch.equal(output, model.generate(ids, max_new_tokens=20, do_sample=False))


def test_the_check_draws_no_random_numbers_and_moves_nothing() -> None:
    model = randomised(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    kind = equivalence(model)
    assert kind.holds("trees")
    assert kind.holds("batches")
    assert kind.holds("padding")
    assert kind.holds("holes")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn"])
def test_a_prompt_beyond_the_context_of_rope(rope_type: str) -> None:
    """transformers warns and continues."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    model = randomised(LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=32, rope_parameters=rope)), 0.3)
    for tokens in (40, 20):
        texts = []
        for decode in (type(model).generate, lookahead.generate):
            model.generate(prompt(5), max_new_tokens=2)  # with dynamic RoPE, a short text resets the frequencies
            texts.append(decode(model, prompt(tokens), max_new_tokens=40, do_sample=False))
        assert torch.equal(*texts)


def test_the_decoder_of_whisper_has_a_table_of_positions() -> None:
    """The table's size has a special name; no tree reaches beyond it."""
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = AutoConfig.for_model("whisper", vocab_size=97, max_target_positions=60, **sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.is_encoder_decoder = False
    model = randomised(WhisperForCausalLM(config), 0.2)
    assert_exact(model, prompt(20), max_new_tokens=39)


def test_phi4_multimodal_up_to_where_plain_decoding_breaks() -> None:
    """Beyond its first context, transformers drops its cache and sends only the last token."""
    config = AutoConfig.for_model("phi4_multimodal", **SIZES, num_key_value_heads=2)
    config.original_max_position_embeddings = 40
    config.vision_config = config.audio_config = None
    kind = equivalence(AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **SIZES)))
    assert kind.holds("trees")
    runner = Limits(config)
    assert (runner.broken_after, runner.recompute_at) == (40, None)


@pytest.mark.parametrize(("version", "broken_after", "recompute_at"), [((5, 19), 32, None), ((5, 20), None, 33)])
def test_phi3_up_to_where_plain_decoding_breaks_before_transformers_5_20(
    version: tuple[int, int], broken_after: int | None, recompute_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookahead.backends.transformers.limits.TRANSFORMERS", version)
    limit = Limits(build("phi3_long_rope").config)
    assert (limit.broken_after, limit.recompute_at) == (broken_after, recompute_at)


def test_a_fault_that_only_makes_trees_fail_counts() -> None:
    """PLBart counts positions itself: trees differ, or exceed its table."""
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = AutoConfig.for_model("plbart", vocab_size=97, max_position_embeddings=60, **sizes)
    config.is_decoder, config.is_encoder_decoder = True, False
    config.bos_token_id = config.eos_token_id = None
    model = randomised(PLBartForCausalLM(config), 0.3)
    with pytest.raises(UnsupportedModelError):
        check_model(model)
    expected = model.generate(prompt(6), do_sample=False, max_new_tokens=20)
    assert torch.equal(lookahead.generate(model, prompt(6), do_sample=False, max_new_tokens=20), expected)  # on chains


def test_no_cache_is_handed_on_where_hidden_tokens_count_as_positions() -> None:
    """RoPE only encodes distances, so the rows are exact; but the keys of a padded row have other positions."""

    class CountsPadding(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            cached = inputs[CACHE].get_seq_length()
            inputs["position_ids"] = torch.arange(cached, cached + inputs["input_ids"].shape[1])[None]
            return inputs

    model = randomised(CountsPadding(LlamaConfig(**SIZES)), 0.3)
    ids, mask = prompt(12), torch.ones(1, 12, dtype=torch.long)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain, output = model.generate(ids, **options), lookahead.generate(model, ids, **options)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.past_key_values is None
    longer = torch.cat([mask, torch.ones(1, 20, dtype=torch.long)], dim=1)
    with pytest.raises(UnsupportedArgumentError, match="cache|past_key_values"):
        lookahead.generate(
            model, plain.sequences, attention_mask=longer, past_key_values=plain.past_key_values, max_new_tokens=4
        )
    assert equivalence(randomised(LlamaForCausalLM(LlamaConfig(**SIZES)))).holds("padded_caches")


def test_only_miniatures_of_the_last_kinds_are_kept() -> None:
    def models_in_memory() -> int:
        gc.collect()
        return sum(type(one) is LlamaForCausalLM for one in gc.get_objects())

    def model(size: int) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(**SIZES | {"intermediate_size": 8 + size}))

    before = models_in_memory()
    first = equivalence(model(0))
    for size in range(36):
        assert not equivalence(model(size)).holds("positions_end")
    assert models_in_memory() - before <= 32
    assert equivalence(model(0)) is first
    assert first.holds("trees"), "a question without an answer builds the miniature again"


def test_models_with_equal_miniatures_share_their_trials() -> None:
    """Sizes beyond a miniature's change none of its passes; settings that it has do."""

    def kind(**sizes: Any) -> Equivalence:
        return equivalence(LlamaForCausalLM(LlamaConfig(**SIZES | sizes)))

    first = kind()
    assert kind(intermediate_size=160, vocab_size=300, num_hidden_layers=3, transformers_version="5.0") is first
    assert kind(pad_token_id=3) is not first
    assert kind(intermediate_size=24) is not first
    assert kind(rms_norm_eps=1e-3) is not first
    assert kind(num_key_value_heads=2) is not first


def test_trials_of_code_that_comes_back_are_kept_and_those_of_hooks_are_not() -> None:
    class Changing(LlamaForCausalLM):
        pass

    model = Changing(LlamaConfig(**SIZES)).eval()
    first = equivalence(model)

    def kind() -> Equivalence:
        return equivalence(Changing(model.config))

    Changing.forward = lambda self, *args, **kwargs: super(Changing, self).forward(*args, **kwargs)
    replaced = kind()
    assert replaced is not first
    assert kind() is replaced
    del Changing.forward
    assert kind() is first
    with torch.nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert kind() is not first
    assert kind() is first


@pytest.mark.parametrize("family", ["gemma4_text", "dots3_note_text"])
def test_sizes_that_layers_have_for_themselves(family: str) -> None:
    """A miniature has fewer layers, so per-layer sizes need other indices, and are small."""
    config = AutoConfig.for_model(family)
    assert config.to_dict()["per_layer_config"]
    kind = type(AutoModelForCausalLM.from_config(miniature_config(config)))
    small = build_miniature(kind, config, seed=0)
    assert set(small.config.layer_types) == set(config.layer_types)
    assert sum(weights.numel() for weights in small.parameters()) < 1_000_000


FEW_TOKENS = {
    "mamba2": {"head_dim": 16, "num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "roformer": {"is_decoder": True, "embedding_size": 64, "max_position_embeddings": 128},
}


@pytest.mark.parametrize(("tokens", "family"), diagonal([30, 5], FEW_TOKENS))
def test_models_of_few_tokens_are_tried(family: str, tokens: int) -> None:
    """Protein models have about thirty tokens; a miniature has the number that its texts need."""
    config = AutoConfig.for_model(family, **{**SIZES, **FEW_TOKENS[family], "vocab_size": tokens})
    model = randomised(AutoModelForCausalLM.from_config(config), 0.3)
    ids = torch.tensor([[3, 1, 4, 1, 2, 3, 1, 4]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    output = lookahead.generate(
        model, ids, max_new_tokens=20, do_sample=False, lookahead_config=LookaheadConfig(step_budget=8)
    )
    assert torch.equal(output, expected)


def test_padded_rows_of_few_tokens_that_count_padding() -> None:
    config = AutoConfig.for_model("mpt", vocab_size=30, d_model=64, n_heads=4, n_layers=2, max_seq_len=128)
    config.bos_token_id = config.eos_token_id = None
    model = randomised(AutoModelForCausalLM.from_config(config), 0.3)
    ids = torch.tensor([[0, 0, 0, 5, 9, 3], [3, 5, 9, 3, 5, 9]])
    with pytest.raises(UnsupportedArgumentError, match="hides tokens"):
        lookahead.generate(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("family", ["m2m_100/encoder", "bart/encoder", "roberta"])
def test_padding_tokens_inside_of_a_text_without_a_cache(family: str) -> None:
    """M2M-100 skips positions of padding when it reads the whole text, but counts them after a cache."""
    model = build_family(family, Variant(), "sdpa")
    pad = model.config.get_text_config(decoder=True).pad_token_id
    ids = prompt(7)
    arguments = read_by(model, ids, torch.ones_like(ids)) if model.config.is_encoder_decoder else {"input_ids": ids}

    def pads(batch: int, text: torch.Tensor) -> list[int]:
        return [pad] if len(text) % 4 == 0 else list(range(3, 90))

    options = {**arguments, "max_new_tokens": 24, "do_sample": False, "prefix_allowed_tokens_fn": pads}
    drafts = LookaheadConfig(step_budget=8)
    assert torch.equal(lookahead.generate(model, lookahead_config=drafts, **options), model.generate(**options))
    if family == "m2m_100/encoder":
        with pytest.raises(UnsupportedArgumentError, match="use_cache=False"):
            lookahead.generate(model, use_cache=False, **options)
    else:
        expected = model.generate(use_cache=False, **options)
        assert torch.equal(lookahead.generate(model, use_cache=False, lookahead_config=drafts, **options), expected)


def test_rows_that_depend_on_each_other_in_plain_decoding() -> None:
    """RWKV adds the states of all rows to each, so rows of a batch differ from single rows."""
    model = build_family("rwkv", Variant(), "eager")
    ids, options = torch.cat([prompt(5), prompt(5, 1)]), {"max_new_tokens": 20, "do_sample": False}
    alone = torch.cat([model.generate(row[None], **options) for row in ids])
    assert not torch.equal(model.generate(ids, **options), alone)
    with pytest.raises(UnsupportedArgumentError, match="input_ids has 2 rows"):
        lookahead.generate(model, ids, **options)
    assert torch.equal(torch.cat([lookahead.generate(model, row[None], **options) for row in ids]), alone)
