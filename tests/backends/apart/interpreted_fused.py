"""Fused norms and rotary embeddings in Triton's interpreter, against transformers' modules.

The interpreter must be chosen before Triton is imported: `test_tree_attention.py` runs this file in a separate
process. The interpreter stores bfloat16 as raw bits, so tests use float16 and float32.
"""

import signal
from collections.abc import Callable
from cProfile import Profile
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from triton.runtime.interpreter import TensorHandle

from lookahead.backends.transformers import fused_kernels
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.fused import fused_kind, joined_kind
from lookahead.backends.transformers.fused_kernels import rotate
from lookahead.backends.transformers.row_pool import LayerShape, RowPool
from model_zoo import build, in_type


def calls(profile: Profile, function: Callable[..., Any]) -> int:
    """The calls of a function while the profile was taken."""
    return sum(entry.callcount for entry in profile.getstats() if entry.code is unwrap(function).__code__)


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

    monkeypatch.setattr(fused_kernels, "libdevice", SimpleNamespace(exp=exp))


def test_gated_layers_give_the_bits_of_the_model(exponential: None) -> None:
    """The trial compares all 63,488 finite numbers of float16."""
    model = build("llama").half()
    expected = model(torch.arange(5)[None]).logits
    for layer in model.model.layers:
        layer.mlp.__class__ = fused_kind(layer.mlp, LlamaMLP)
        assert type(layer.mlp) is not LlamaMLP
    with Profile() as profile:
        assert torch.equal(model(torch.arange(5)[None]).logits, expected)
    assert calls(profile, fused_kernels.gate) == len(model.model.layers)


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite"])
def test_norms_of_layers_give_the_bits_of_separate_sums(family: str) -> None:
    """The sums before the norms of each layer but the first norm, and before the norm after all layers."""
    model = in_type(family, torch.float16)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = fused_kind(module, type(module))
    tokens = torch.arange(5)[None]
    expected = model(tokens).logits
    for layer in model.model.layers:
        own = type(layer)
        layer.__class__ = joined_kind(layer, own)
        assert type(layer) is not own
    with Profile() as profile:
        assert torch.equal(model(tokens).logits, expected)
    assert calls(profile, fused_kernels.add_norm) == 2 * len(model.model.layers)


@pytest.mark.parametrize("family", ["olmo2", "cohere"])
def test_layers_that_read_their_sums_stay(family: str) -> None:
    layer = in_type(family, torch.float16).model.layers[0]
    assert joined_kind(layer, type(layer)) is type(layer)


class ScaledAttention(LlamaAttention):  # type: ignore[misc]
    """Reads its rotated queries before it writes to the cache."""

    def forward(self, hidden_states: Any, position_embeddings: Any, cache: Any, **named: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        states = [part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)]
        query, key = apply_rotary_pos_emb(states[0], states[1], *position_embeddings)
        query = query * 2
        keys, values = cache.update(key, states[2], self.layer_idx)
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True), None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("family", "own", "writes"),
    [("llama", LlamaAttention, 1), ("qwen3", Qwen3Attention, 1), ("llama", ScaledAttention, 0)],
)
def test_rotary_embeddings_write_the_bits_of_the_model_to_its_cache(
    family: str, own: Any, writes: int, dtype: torch.dtype
) -> None:
    attention: Any = in_type(family, dtype).model.layers[0].self_attn
    attention.__class__ = own
    config = attention.config
    random = torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, config.hidden_size, generator=random).to(dtype)
    cos, sin = (torch.randn(rows, 5, attention.head_dim, generator=random).to(dtype) for rows in (1, 1))
    arguments = {"hidden_states": states, "position_embeddings": (cos, sin), "attention_mask": None}
    shape = LayerShape(config.num_key_value_heads, attention.head_dim, attention.head_dim, dtype)
    results = []
    kinds = own, fused_kind(attention, own)
    assert kinds[1] is not own
    with Profile() as profile:
        for kind in kinds:
            attention.__class__ = kind
            cache = RowPool([shape], 48, 16, torch.device("cpu"))
            with torch.no_grad(), cache.written_at(torch.tensor([7, 60, 3, 4, 5])):
                output, _ = attention(**arguments, **{CACHE: cache})
            results.append([output, *cache.buffers])
    assert calls(profile, fused_kernels.rotate_into) == writes
    assert all(map(torch.equal, *results))


class TimeIsUp(Exception):
    """Raised by the handler of a signal."""


class Signalling(torch.nn.Module):
    """An activation during which a signal arrives."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        return states


def test_a_time_limit_ends_a_trial(exponential: None) -> None:
    def end(number: int, frame: object) -> None:
        raise TimeIsUp

    layer: Any = in_type("llama", torch.float16).model.layers[0].mlp
    layer.act_fn = Signalling()
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(TimeIsUp):
            fused_kind(layer, LlamaMLP)
    finally:
        signal.signal(signal.SIGTERM, before)
