"""Invariant passes: the bits of a token's logits do not depend on drafts, other rows, or the split into passes."""

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import lookahead
import model_zoo
from lookahead import LookaheadConfig
from lookahead.backends.transformers import comparisons, invariant
from lookahead.backends.transformers.attention import invariant_attention
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.fixed_passes import FIXED_ROWS
from lookahead.backends.transformers.tree_attention import unpack
from model_zoo import ARCHITECTURES
from tree_attention_cases import Step, attention_by_definition, states, steps, tolerance

TYPES = (torch.bfloat16, torch.float16)
PLAIN = LookaheadConfig(preset="autoregressive", invariant=True)
DRAFTS = [
    *({"preset": preset, "step_budget": budget} for preset, budget in itertools.product(["auto"], [1, 7, 16, 33, 64])),
    {"preset": "token_recycling", "step_budget": 33},
    {"preset": "context_matches", "step_budget": 16},
    {"preset": "paper", "window_size": 5, "ngram_size": 4, "guess_set_size": 5},
    {"preset": "jacobi", "block_size": 7},
]
EXACT = [name for name, kind in ARCHITECTURES.items() if kind.attention == ("sdpa", "eager")]
REFUSED = ("falcon_new", "falcon_multi_query", "stablelm", "llama4_chunked")
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 40, 3, 14]])


in_type = cache(model_zoo.in_type)


def decode(model: PreTrainedModel, prompt: torch.Tensor, config: LookaheadConfig, **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": 24, "do_sample": False} | kwargs
    torch.manual_seed(5)
    return lookahead.generate(
        model, prompt, lookahead_config=config, return_dict_in_generate=True, output_logits=True, **kwargs
    )


def assert_same_bits(output: Any, expected: Any, note: object = "") -> None:
    assert torch.equal(output.sequences, expected.sequences), note
    for place, (got, theirs) in enumerate(zip(output.logits, expected.logits, strict=True)):
        assert torch.equal(got, theirs), (note, place)


# Both kinds of products: with all rows, and with the tokens of an expert.
BFLOAT, HALF = TYPES
QUICK = [("llama", BFLOAT), ("mixtral", HALF)]


@pytest.mark.parametrize(("name", "dtype"), QUICK, ids=str)
def test_drafts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    model = in_type(name, dtype)
    plain = decode(model, PROMPT, PLAIN)
    taken = []
    for draft in DRAFTS[::2] if name == "llama" else DRAFTS[2::3]:
        output = decode(model, PROMPT, LookaheadConfig(invariant=True, **draft))
        assert_same_bits(output, plain, draft)
        taken.append(output.statistics.steps)
    assert min(taken) < 16, "no draft was accepted: the test shows nothing"


@pytest.mark.exact
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["demo", *EXACT])
def test_drafts_change_no_bit_of_any_architecture(name: str, dtype: torch.dtype) -> None:
    model = in_type(name, dtype)
    try:
        plain = decode(model, PROMPT, PLAIN)
    except lookahead.UnsupportedArgumentError:
        assert name in REFUSED
        return
    for draft in DRAFTS:
        assert_same_bits(decode(model, PROMPT, LookaheadConfig(invariant=True, **draft)), plain, draft)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sampling_draws_from_the_same_bits(name: str) -> None:
    model, sampled = in_type(name, torch.bfloat16), {"do_sample": True, "temperature": 0.7}
    plain = decode(model, PROMPT, PLAIN, **sampled)
    for draft in DRAFTS[1:8:2]:
        assert_same_bits(decode(model, PROMPT, LookaheadConfig(invariant=True, **draft), **sampled), plain, draft)


def test_rows_of_a_sampled_batch_draw_each_for_itself() -> None:
    model, sampled = in_type("llama", torch.bfloat16), {"do_sample": True, "temperature": 0.7, "eos_token_id": None}
    prompts = torch.cat([PROMPT, PROMPT + 5, PROMPT])
    plain = decode(model, prompts, PLAIN, **sampled)
    assert not torch.equal(plain.sequences[0], plain.sequences[2]), "the same prompt, and draws of its own"
    for draft in DRAFTS[1:6:2]:
        assert_same_bits(decode(model, prompts, LookaheadConfig(invariant=True, **draft), **sampled), plain, draft)
    assert_same_bits(decode(model, prompts, LookaheadConfig(invariant=True), **sampled), plain, "nodes by the clock")


def test_statistics_say_whether_a_text_was_made_so() -> None:
    model = in_type("llama", torch.bfloat16)
    assert decode(model, PROMPT, PLAIN).statistics.invariant_rows >= 1
    output = decode(model, PROMPT, LookaheadConfig(invariant=False))
    assert output.statistics.to_dict()["invariant_rows"] == 0


@pytest.mark.parametrize("pack_weights", [False, True])
def test_rows_of_a_batch_have_the_bits_of_single_rows(pack_weights: bool) -> None:
    model = in_type("llama", torch.bfloat16)
    prompts = torch.randint(5, 70, (8, 21), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompts)
    for row in range(8):
        mask[row, : row * 2] = 0
    alone = [
        decode(model, prompts[row : row + 1, row * 2 :], PLAIN, pad_token_id=0, eos_token_id=None) for row in range(8)
    ]
    for count, budget in ((1, 33), (2, 7), (3, 64), (8, 16)):
        config = LookaheadConfig(step_budget=budget, invariant=True, pack_weights=pack_weights)
        kwargs = {"attention_mask": mask[:count], "pad_token_id": 0, "eos_token_id": None}
        output = decode(model, prompts[:count], config, **kwargs)
        for row in range(count):
            assert torch.equal(output.sequences[row, 21:], alone[row].sequences[0, 21 - 2 * row :])
            for got, theirs in zip(output.logits, alone[row].logits, strict=True):
                assert torch.equal(got[row : row + 1], theirs)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_is_the_same_wherever_it_was_split(name: str) -> None:
    model, config = in_type(name, torch.bfloat16), LookaheadConfig(step_budget=16, invariant=True)
    whole = decode(model, PROMPT, PLAIN)
    text = whole.sequences
    for split in (16, 20, 31):  # a part of the answer becomes a part of the prompt
        rest = decode(model, text[:, :split], config, max_new_tokens=text.shape[1] - split)
        assert torch.equal(rest.sequences, text)
        assert all(torch.equal(a, b) for a, b in zip(rest.logits, whole.logits[split - 15 :], strict=True))
    for chunk in (1, 4, 7):
        assert_same_bits(decode(model, PROMPT, config, prefill_chunk_size=chunk), whole, chunk)
    first = decode(model, PROMPT, config, max_new_tokens=9)
    rest = decode(model, first.sequences, config, past_key_values=first.past_key_values, max_new_tokens=15)
    assert torch.equal(rest.sequences, text)
    assert all(torch.equal(a, b) for a, b in zip((*first.logits, *rest.logits), whole.logits, strict=True))


@pytest.mark.exact
def test_long_prompts_in_chunks_give_the_same_text() -> None:
    model = in_type("demo", torch.bfloat16)
    prompt = torch.randint(5, 4000, (1, 1100), generator=torch.Generator().manual_seed(3))
    long = decode(model, prompt, LookaheadConfig(step_budget=7, invariant=True), max_new_tokens=3)
    assert long.statistics.prefill_passes == 1
    assert_same_bits(decode(model, prompt, PLAIN, max_new_tokens=3, prefill_chunk_size=100), long)


@pytest.mark.exact
def test_packed_weights_and_number_of_threads_change_no_bit() -> None:
    model, few = in_type("qwen3", torch.bfloat16), {"max_new_tokens": 8}
    plain = decode(model, PROMPT, PLAIN, **few)
    packed = LookaheadConfig(step_budget=33, invariant=True, pack_weights=True)
    assert_same_bits(decode(model, PROMPT, packed, **few), plain)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        plain = decode(model, PROMPT, PLAIN, **few)
        assert_same_bits(decode(model, PROMPT, LookaheadConfig(step_budget=33, invariant=True), **few), plain)
    finally:
        torch.set_num_threads(threads)


def test_the_model_and_other_calls_stay_unchanged() -> None:
    model = in_type("llama", torch.bfloat16)
    before = decode(model, PROMPT, LookaheadConfig(preset="autoregressive"))
    decode(model, PROMPT, PLAIN)
    assert_same_bits(decode(model, PROMPT, LookaheadConfig(preset="autoregressive")), before)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "dtype", "config", "words"),
    [
        ("stablelm", torch.bfloat16, {}, "attention interface"),
        ("gpt_oss", torch.bfloat16, {}, "attention sinks"),
        ("llama4_chunked", torch.bfloat16, {}, "experts has its own kind of product"),
        ("llama", torch.float64, {}, "float64"),
    ],
)
def test_models_that_cannot_be_invariant_are_refused_with_the_reason(
    name: str, dtype: torch.dtype, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(lookahead.UnsupportedArgumentError, match=f"invariant=True.*{words}.*invariant=False"):
        decode(in_type(name, dtype), PROMPT, LookaheadConfig(invariant=True, **config))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", BFLOAT), ("gemma3", HALF), *(pytest.param(name, BFLOAT, marks=pytest.mark.exact) for name in EXACT)],
    ids=str,
)
def test_static_passes_of_one_size_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Prompts and trees longer and shorter than a pass, and batches, which are dynamic on a CPU."""
    model, few = in_type(name, dtype), {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    try:
        plain = decode(model, PROMPT, PLAIN, **few)
    except lookahead.UnsupportedArgumentError:
        assert name in REFUSED
        return
    for draft in ({"preset": "autoregressive"}, {"step_budget": 16}, {"step_budget": 90}, DRAFTS[-2]):
        output = decode(model, PROMPT, LookaheadConfig(invariant=True, engine="static", **draft), **few)
        assert_same_bits(output, plain, draft)
        assert name not in ("llama", "gemma3") or output.statistics.invariant_rows == FIXED_ROWS
    if name == "llama":
        long = torch.cat([PROMPT] * 5, dim=1)
        plain, static = decode(model, long, PLAIN, **few), LookaheadConfig(invariant=True, engine="static")
        output = decode(model, long, static, **few)
        assert_same_bits(output, plain)
        assert output.statistics.prefill_passes == 1
        rows = torch.cat([PROMPT, PROMPT + 5, PROMPT + 1])
        first = decode(model, rows, static, **few | {"max_new_tokens": 3})
        inputs = {"past_key_values": first.past_key_values, "attention_mask": torch.ones_like(first.sequences)}
        rest = decode(model, first.sequences, static, **few | {"max_new_tokens": 5, **inputs})
        plain = decode(model, rows, PLAIN, **few)
        assert torch.equal(rest.sequences, plain.sequences)
        assert all(torch.equal(a, b) for a, b in zip((*first.logits, *rest.logits), plain.logits, strict=True))


def test_a_layer_that_reads_other_rows_is_detected() -> None:
    class Company(torch.nn.Module):
        """Add a unit in the last place if there are many rows."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            output = self.inner(states)
            return output * (1 + 2**-7) if states.shape[1] > 4 else output

    model = type(in_type("llama", torch.bfloat16))(in_type("llama", torch.bfloat16).config).to(torch.bfloat16).eval()
    model.model.layers[0].mlp = Company(model.model.layers[0].mlp)
    with pytest.raises(lookahead.UnsupportedArgumentError, match="other company"):
        decode(model, PROMPT, PLAIN)


class PickyExperts(MixtralExperts):
    """Experts on a processor with another order of summation for fewer than four tokens."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        few = torch.bincount(chosen.flatten())[chosen] < 4
        return super().forward(hidden, chosen, torch.where(few, 1.5 * weights, weights))


def with_care(module: torch.nn.Module) -> torch.nn.Module:
    """Return the replacement of a module in invariant passes."""
    care = invariant.empty_module(invariant.invariant_kind(module, type(module)))
    vars(care).update(vars(module))
    return care


@torch.no_grad()
def test_experts_have_the_rows_that_their_products_need() -> None:
    experts = copy.deepcopy(in_type("mixtral", torch.float16).model.layers[0].mlp.experts)
    experts.__class__ = PickyExperts
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(150, 48, generator=draws).half()
    chosen = torch.rand(150, 4, generator=draws).argsort(dim=1)[:, :2]
    weights = torch.rand(150, 2, generator=draws).half()
    care = with_care(experts)
    together = care(hidden, chosen, weights)
    # With 150 tokens, each expert has enough rows, so the result is the plain one.
    torch.testing.assert_close(together, experts(hidden, chosen, weights), rtol=2e-3, atol=2e-3)
    for count in (1, 2, 5, 40):
        for parts in zip(*(each.split(count) for each in (hidden, chosen, weights, together)), strict=True):
            assert torch.equal(care(*parts[:3]), parts[3]), count
    assert not torch.equal(experts(hidden[:1], chosen[:1], weights[:1]), together[:1]), "the test shows nothing"


@torch.no_grad()
def test_routers_choose_the_same_whatever_the_other_rows() -> None:
    """DeepSeek's router uses a float32 sigmoid, which torch computes differently after the last whole vector."""
    router = in_type("deepseek_v3", torch.float16).model.layers[1].mlp.gate
    hidden = torch.randn(1, 70, 48, generator=torch.Generator().manual_seed(0)).half()
    care = with_care(router)
    together = care(hidden)
    alone = [care(hidden[:, row : row + 1]) for row in range(70)]
    for output, singles in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(output, torch.cat(singles))
    plain = [router(hidden[:, row : row + 1])[1] for row in range(70)]
    assert not torch.equal(router(hidden)[1], torch.cat(plain)), "the test shows nothing"


def differing_products() -> Iterator[tuple[invariant.Product, invariant.RowRule | None]]:
    """Yield products with bits that depend on the number of rows, and the right rule for each."""

    def bent(changes: Any) -> invariant.Product:
        return lambda sample: sample * (2.0 if changes(len(sample)) else 1.0)

    yield bent(lambda count: False), invariant.RowRule(1, invariant.MAX_ROWS)
    yield bent(lambda count: count == 1), invariant.RowRule(2, invariant.MAX_ROWS)
    yield bent(lambda count: count < 4), invariant.RowRule(4, invariant.MAX_ROWS)
    yield bent(lambda count: count < 48), invariant.RowRule(16, 16)
    yield lambda sample: sample + torch.arange(len(sample))[:, None], None
    # One row in a thousand, like rounding.
    yield (
        lambda sample: sample * torch.where((len(sample) == 2) & (sample[:, :1] > 3), 2.0, 1.0),
        invariant.RowRule(4, invariant.MAX_ROWS),
    )


@pytest.mark.parametrize("case", range(6))
def test_the_rule_for_rows_is_found_and_kept(case: int) -> None:
    product, expected = list(differing_products())[case]
    sample = torch.randn(invariant.MAX_ROWS, 3)
    rule = invariant.find_rule(product, 3, torch.float32)
    assert rule == expected
    if rule is not None:
        alone = torch.cat([invariant.by_rule(product, row[None], rule) for row in sample[:70]])
        for count in (1, 2, 15, 16, 17, 33, 70):
            assert torch.equal(invariant.by_rule(product, sample[:count], rule), alone[:count])


@settings(max_examples=15, deadline=None)
@given(step=steps(max_nodes=40, max_length=150), softcap=st.sampled_from([None, 30.0]), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("dtype", [torch.float32, *TYPES], ids=str)
def test_attention_is_attention_by_its_definition(
    dtype: torch.dtype, step: Step, softcap: float | None, seed: int
) -> None:
    query, key, value = states(step, 4, 2, 18, 10, 3, dtype, seed)
    output, _ = invariant_attention(torch.nn.Module(), query, key, value, step.packed(), 0.25, softcap=softcap)
    visible = unpack(step.packed(), key.shape[2])[:, 0].numpy()
    expected = attention_by_definition(query, key, value, visible, 0.25, softcap)
    np.testing.assert_allclose(output.float().numpy(), expected, rtol=0, atol=tolerance(dtype, value))


@pytest.mark.parametrize("window", [None, 9])
def test_attention_of_a_path_is_that_of_the_text_it_becomes(window: int | None) -> None:
    """Keys after the text among other branches, and keys in their final slots, give the same bits."""
    draws = torch.Generator().manual_seed(0)
    length, depth, wrong = 70, 6, 9
    nodes = depth * (wrong + 1)
    query, key, value = (torch.randn(1, heads, length + nodes, 24, generator=draws).bfloat16() for heads in (6, 2, 2))
    path = [wrong + level * (wrong + 1) for level in range(depth)]
    parents = [-1 if node < wrong + 1 else path[node // (wrong + 1) - 1] for node in range(nodes)]
    tree = Step([parents], [length], 0, window, None).packed()
    inside = invariant_attention(torch.nn.Module(), query[:, :, length:], key, value, tree)[0][:, path]
    text = torch.cat([torch.arange(length), length + torch.tensor(path)])
    for level in range(depth):
        seen = text[: length + level + 1]
        single = Step([[-1]], [length + level], 0, window, None).packed()
        alone, _ = invariant_attention(
            torch.nn.Module(), query[:, :, seen[-1:]], key[:, :, seen], value[:, :, seen], single
        )
        assert torch.equal(alone[:, 0], inside[:, level])


def test_the_check_accepts_the_clone_and_refuses_the_plain_model() -> None:
    """Logits along a text come in the order of its tokens, for any split into passes."""
    model = in_type("demo", torch.bfloat16)
    clone = engine_model(model, invariant=True)
    assert comparisons.check_invariance(clone)
    assert not comparisons.check_invariance(model)
