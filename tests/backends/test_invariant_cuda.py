"""Invariant passes on a GPU: graphs of one size, and the kernel with splits at fixed positions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.attention import BY_POSITION
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.fixed_passes import FIXED_ROWS
from lookahead.backends.transformers.tree_attention import along_paths
from model_zoo import in_type
from test_invariant import DRAFTS, PLAIN, PROMPT, TYPES, assert_same_bits, decode
from tree_attention_cases import Step, attention_by_definition, states, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODELS = ["llama", "demo", "qwen3", "gemma3", "mistral_sliding", "deepseek_v3"]


def on_gpu(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return copy.deepcopy(in_type(name, dtype)).to("cuda")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    model, prompt = on_gpu(name, dtype), PROMPT.cuda()
    if name == "deepseek_v3" and dtype == torch.float16:  # torch needs the host for its experts' products
        with pytest.raises(lookahead.UnsupportedArgumentError, match="fixed shapes fail"):
            decode(model, prompt, PLAIN)
        return
    plain = decode(model, prompt, PLAIN)
    assert plain.statistics.invariant_rows == FIXED_ROWS
    assert engine_model(model, invariant=True).config._attn_implementation == BY_POSITION
    for draft in (*DRAFTS, {"step_budget": 128}):
        assert_same_bits(decode(model, prompt, LookaheadConfig(invariant=True, **draft)), plain, draft)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
def test_rows_of_a_batch_have_the_bits_of_single_rows(sampled: dict[str, Any]) -> None:
    model = on_gpu("llama", torch.bfloat16)
    prompts = torch.randint(5, 70, (8, 21), generator=torch.Generator().manual_seed(2)).cuda()
    few = {"pad_token_id": 0, "eos_token_id": None, **sampled}
    for count, budget in ((2, 7), (3, 64), (5, 33), (8, 16)):
        plain = decode(model, prompts[:count], PLAIN, **few)
        assert_same_bits(
            decode(model, prompts[:count], LookaheadConfig(step_budget=budget, invariant=True), **few), plain
        )
        if not sampled:
            for row in range(count):
                alone = decode(model, prompts[row : row + 1], PLAIN, **few)
                assert torch.equal(plain.sequences[row], alone.sequences[0])
                for got, theirs in zip(plain.logits, alone.logits, strict=True):
                    assert torch.equal(got[row : row + 1], theirs)


def test_a_text_is_the_same_wherever_it_was_split_and_however_long_its_buffers_are() -> None:
    model, config = on_gpu("llama", torch.bfloat16), LookaheadConfig(step_budget=16, invariant=True)
    prompt = torch.randint(5, 70, (1, 700), generator=torch.Generator().manual_seed(3)).cuda()
    whole = decode(model, prompt, PLAIN)
    for chunk in (1, 64, 100):
        assert_same_bits(decode(model, prompt, config, prefill_chunk_size=chunk), whole, chunk)
    longer = decode(model, prompt, config, max_new_tokens=2000)
    assert torch.equal(longer.sequences[:, : whole.sequences.shape[1]], whole.sequences)
    first = decode(model, prompt, config, max_new_tokens=9)
    rest = decode(model, first.sequences, config, past_key_values=first.past_key_values, max_new_tokens=15)
    assert all(torch.equal(a, b) for a, b in zip((*first.logits, *rest.logits), whole.logits, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *TYPES], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_kernel_is_attention_whatever_the_other_rows(dtype: torch.dtype, size: int) -> None:
    from lookahead.backends.transformers.tree_attention.kernel import attention_by_position

    chain = [*range(-1, 63)]
    whole = Step([chain], [900], 5, None, None)
    query, key, value = states(whole, 8, 2, size, size, 30, dtype, 0)
    mask = along_paths(whole.packed())
    gpu = [tensor.cuda() for tensor in (query, key, value)]
    together = attention_by_position(*gpu, mask.cuda(), size**-0.5)
    visible = whole.visible(key.shape[2])
    expected = attention_by_definition(query, key, value, visible, size**-0.5, None)
    np.testing.assert_allclose(together.double().cpu().numpy(), expected, rtol=0, atol=tolerance(dtype, value))
    text = torch.cat([torch.arange(900), whole.scratch + torch.arange(64)]).cuda()
    for node in (0, 1, 15, 40, 63):
        seen = text[: 901 + node]
        single = along_paths(Step([[-1]], [900 + node], 0, None, None).packed()).cuda()
        alone = attention_by_position(
            gpu[0][:, :, node : node + 1], gpu[1][:, :, seen], gpu[2][:, :, seen], single, size**-0.5
        )
        assert torch.equal(alone[:, 0], together[:, node])


def test_engines_refuse_invariant_passes() -> None:
    with pytest.raises(lookahead.UnsupportedArgumentError, match="not on a CPU"):
        lookahead.Engine(on_gpu("llama", torch.bfloat16), LookaheadConfig(invariant=True))
