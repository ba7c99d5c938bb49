"""Weights in eight bits: another model, but the same text with every draft, to the bit."""

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
import model_zoo
from lookahead import LookaheadConfig
from lookahead.backends.transformers import int8_linear
from lookahead.backends.transformers.int8_linear import Int8Linear, Int8Weight, products_are_exact, rounded_rows
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

TYPES = (torch.float32, torch.bfloat16)
PLAIN = LookaheadConfig(preset="autoregressive", pack_weights="int8")
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 40, 3, 14]])

needs_vnni = pytest.mark.skipif(not products_are_exact(), reason="products of bytes overflow on this processor")


def packed(layer: torch.nn.Linear) -> Int8Linear:
    int8 = Int8Linear.__new__(Int8Linear)
    vars(int8).update(vars(layer))
    int8.pack()
    return int8


def decode(model: PreTrainedModel, config: LookaheadConfig, **kwargs: object) -> torch.Tensor:
    torch.manual_seed(5)
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | kwargs
    return lookahead.generate(model, PROMPT, lookahead_config=config, **arguments)


@needs_vnni
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_rounded_numbers(bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(200, 96, bias=bias)
    rows = torch.randn(7, 200)
    rows[3] = 0.0
    weight, scales = layer.weight.detach(), layer.weight.detach().abs().amax(dim=1) / 127
    whole = (weight / scales[:, None]).round().double()
    own = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    expected = ((rows / own).round().double() @ whole.T) * scales * own
    if bias:
        expected += layer.bias.detach()
    with torch.no_grad():
        torch.testing.assert_close(packed(layer)(rows).double(), expected, rtol=1e-6, atol=1e-6)
    assert (expected - layer(rows)).norm() < 0.02 * expected.norm()


@needs_vnni
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = packed(torch.nn.Linear(320, 160).to(dtype))
    rows = torch.randn(64, 320).to(dtype)
    with torch.no_grad():
        together = layer(rows)
        for count in (1, 2, 3, 5, 16, 33):
            for first in range(0, 64 - count, 7):
                assert torch.equal(layer(rows[first : first + count]), together[first : first + count]), (count, first)


@needs_vnni
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_rows_have_no_results(dtype: torch.dtype) -> None:
    """As where a pass reads a part of a prompt, and no logits are wanted of it."""
    layer = packed(torch.nn.Linear(320, 160).to(dtype))
    with torch.no_grad():
        assert layer(torch.empty(1, 0, 320, dtype=dtype)).shape == (1, 0, 160)


@needs_vnni
def test_an_engine_reads_a_long_prompt_in_parts() -> None:
    model = model_zoo.build("llama")
    prompt = torch.randint(3, 70, (1, 600), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = lookahead.generate(model, prompt, lookahead_config=PLAIN, **arguments)
    with lookahead.Engine(model, LookaheadConfig(pack_weights="int8")) as engine:
        assert torch.equal(engine.submit(prompt, **arguments).result(), expected)


@needs_vnni
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_drafts_do_not_change_the_text(name: str, dtype: torch.dtype) -> None:
    model = model_zoo.in_type(name, dtype)
    for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 0}):
        plain = decode(model, PLAIN, **sampling)
        for drafts in ({"step_budget": 7}, {"step_budget": 33}, {"window_size": 5, "ngram_size": 4}):
            config = LookaheadConfig(pack_weights="int8", **drafts)
            assert torch.equal(decode(model, config, **sampling), plain), (sampling, drafts)


@needs_vnni
def test_changed_weights_are_rounded_anew() -> None:
    model = model_zoo.in_type("llama", torch.float32)
    before = decode(model, PLAIN)
    head = model.get_output_embeddings().weight
    kept = head.detach().clone()
    with torch.no_grad():
        head.copy_(head.flip(0))
    assert not torch.equal(decode(model, PLAIN), before)
    with torch.no_grad():
        head.copy_(kept)
    assert torch.equal(decode(model, PLAIN), before)


@needs_vnni
def test_inputs_that_leave_no_digits_are_refused() -> None:
    model = model_zoo.build("llama", seed=3)
    with torch.no_grad():  # one huge input of each layer, which its outputs hardly depend on
        for layer in model.model.layers:
            layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 1e6
            for product in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                product.weight[:, 0] = 0
            for product in (layer.mlp.gate_proj, layer.mlp.up_proj):
                product.weight[:, 0] = 0
        model.model.norm.weight[0] = 1e6
        model.get_output_embeddings().weight[:, 0] = 0
    with pytest.raises(UnsupportedArgumentError, match="pack_weights='int8' is not possible"):
        decode(model, PLAIN)


def test_other_words_and_processors_without_the_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="pack_weights='int4' must be True, False or 'int8'"):
        LookaheadConfig(pack_weights="int4")
    assert LookaheadConfig(pack_weights="int8").invariant
    monkeypatch.setattr(int8_linear, "products_are_exact", lambda: False)
    with pytest.raises(UnsupportedArgumentError, match="has no VNNI instructions; use pack_weights=True or False"):
        decode(model_zoo.in_type("llama", torch.float32), PLAIN)


def test_the_compiled_loop_rounds_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randn(40, 333, generator=random), torch.arange(333)[None] - 166.5, torch.zeros(1, 333)])
    found = rounded_rows(rows)
    monkeypatch.setattr(int8_linear, "IS_COMPILED", False)
    for got, expected in zip(found, rounded_rows(rows), strict=True):
        assert torch.equal(got, expected)


@needs_vnni
def test_zeros_and_scales() -> None:
    whole, scales = rounded_rows(torch.tensor([[0.0, 0.0], [-2.0, 1.0]]))
    assert whole.tolist() == [[128, 128], [1, 192]]
    assert scales[1].item() == pytest.approx(2 / 127)
    assert Int8Weight(torch.zeros(4, 8)).product(whole[:, :1].repeat(1, 8)).tolist() == [[0.0] * 4] * 2
