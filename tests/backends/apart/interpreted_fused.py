"""Fused norms and rotary embeddings in Triton's interpreter, against transformers' modules.

The interpreter must be chosen before Triton is imported: `test_tree_attention.py` runs this file in a separate
process. The interpreter stores bfloat16 as raw bits, so tests use float16 and float32.
"""

from inspect import unwrap
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from triton.runtime.interpreter import TensorHandle

from lookahead.backends.transformers import fused
from lookahead.backends.transformers.fused import fused_kind, rotate
from model_zoo import build


def random_weight(norm: torch.nn.Module) -> Any:
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return norm.half()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("size", [96, 1024])
def test_norms_give_the_bits_of_the_module(kind: Any, size: int) -> None:
    norm = random_weight(kind(size))
    stand_in = fused_kind(norm, kind)
    assert stand_in is not kind
    states = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(1)).half()
    expected = norm(states)
    norm.__class__ = stand_in
    result = norm(states)
    assert result.dtype == expected.dtype
    assert int((result != expected).sum()) <= result.numel() // 64  # the mean is summed in another order
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=1e-3)
    assert torch.equal(norm(states[:, 2:3]), result[:, 2:3])  # independent of other rows
    wide = states.float()
    norm.float()
    assert torch.equal(norm(wide), kind.forward(norm, wide))


@pytest.mark.parametrize("norm", [LlamaRMSNorm(32), Qwen3NextRMSNormGated(32).half(), torch.nn.RMSNorm(32).half()])
def test_other_norms_stay(norm: torch.nn.Module) -> None:
    assert fused_kind(norm, type(norm)) is type(norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("attention", "size", "part"), [(LlamaAttention, 6, 6), (GPTNeoXAttention, 8, 4)])
def test_rotary_embeddings_give_the_bits_of_the_function(
    attention: Any, size: int, part: int, dtype: torch.dtype
) -> None:
    original = unwrap(attention.forward).__globals__["apply_rotary_pos_emb"]
    query, key = (torch.randn(2, 5, heads, size).transpose(1, 2).to(dtype) for heads in (4, 2))
    cos, sin = torch.randn(1, 5, part).expand(2, -1, -1).to(dtype), torch.randn(2, 5, part).to(dtype)
    for rotated, expected in zip(rotate(query, key, cos, sin), original(query, key, cos, sin), strict=True):
        assert torch.equal(rotated, expected)


def test_attention_finds_the_function_that_rotates_alike() -> None:
    model = build("llama").half()
    expected = model(torch.arange(5)[None]).logits
    attention = model.model.layers[0].self_attn
    attention.__class__ = fused_kind(attention, LlamaAttention)
    assert type(attention) is not LlamaAttention
    assert torch.equal(model(torch.arange(5)[None]).logits, expected)
    assert type(attention).__name__ == "LlamaAttention"


@pytest.fixture
def exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch's exponential function: the interpreter has no functions of CUDA's library."""

    def exp(states: Any) -> Any:
        values = torch.from_numpy(states.handle.data).exp().numpy()
        return triton.language.core.tensor(TensorHandle(values, states.handle.dtype), states.type)

    monkeypatch.setattr(fused, "libdevice", SimpleNamespace(exp=exp))


def test_gated_layers_give_the_bits_of_the_model(exponential: None) -> None:
    """The trial compares all 63,488 finite numbers of float16."""
    model = build("llama").half()
    expected = model(torch.arange(5)[None]).logits
    for layer in model.model.layers:
        layer.mlp.__class__ = fused_kind(layer.mlp, LlamaMLP)
        assert type(layer.mlp) is not LlamaMLP
    with mock.patch.object(fused, "gate", wraps=fused.gate) as gate:
        assert torch.equal(model(torch.arange(5)[None]).logits, expected)
    assert gate.call_count == len(model.model.layers)


def test_other_gated_layers_stay(exponential: None) -> None:
    """Another activation; float32; another forward pass."""
    mlp = build("llama").float().model.layers[0].mlp
    assert fused_kind(mlp, LlamaMLP) is LlamaMLP
    mlp.half().act_fn = torch.nn.GELU()
    assert fused_kind(mlp, LlamaMLP) is LlamaMLP
    mlp.act_fn = torch.nn.SiLU()
    other = type("Other", (LlamaMLP,), {"forward": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)))})
    assert fused_kind(mlp, other) is other


def test_attention_that_turns_neighbours_stays() -> None:
    config = build("llama").config
    attention = CohereAttention.__new__(CohereAttention)
    torch.nn.Module.__init__(attention)
    attention.projection = torch.nn.Linear(2, config.hidden_size)
    assert fused_kind(attention, CohereAttention) is CohereAttention
