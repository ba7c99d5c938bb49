"""Tiny models of mlx-lm with random weights, one for each architecture, and a tokenizer of words."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead.backends.mlx.model import MLXModel

VOCABULARY = 96
WINDOW = 12

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_WINDOWED = ["sliding_attention", "full_attention"]
_YARN = {"type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 512}

TREES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 4.0},
    "phi3": {"original_max_position_embeddings": 512},
    "olmo2": {},
    "deepseek_v3": {
        **_ROUTED,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
    },
    "glm4_moe": {**_ROUTED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
}
"""Architectures that run on trees, and their settings."""

CHAINS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "mistral3": {
        "text_config": {
            **_SIZES,
            "model_type": "ministral3",
            "sliding_window": WINDOW,
            "layer_types": _WINDOWED,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        }
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _WINDOWED,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
        "mamba_chunk_size": 16,
    },
    "qwen3_next": {
        **_EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 32,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
}
"""Architectures with windows or running states, which run on chains, and their settings."""


def tokenizer(ends: tuple[int, ...] = (), words: int = VOCABULARY) -> TokenizerWrapper:
    """Return mlx-lm's tokenizer of a word for each token id."""
    vocabulary = {f"w{number}": number for number in range(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner), eos_token_ids=list(ends))


def build_module(architecture: str, seed: int = 0, dtype: Any = mx.float32, **options: Any) -> Any:
    """Return a model of mlx-lm with random weights."""
    settings = {**_SIZES, "model_type": architecture, **{**TREES, **CHAINS}[architecture], **options}
    kind, arguments = _get_classes(settings)
    before = mx.random.state[0].tolist()
    mx.random.seed(seed)
    module = kind(arguments.from_dict(settings))
    module.update(tree_map(_drawn, module.parameters()))
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    mx.random.seed(before[0] << 32 | before[1])
    return module


def _drawn(weight: Any) -> Any:
    """Return random weights of a visible size, so that each token changes the logits."""
    return weight + 0.3 * mx.random.normal(weight.shape) if mx.issubdtype(weight.dtype, mx.floating) else weight


def build_mlx(architecture: str, seed: int = 0, dtype: Any = mx.float32) -> MLXModel:
    """Return a tiny model with its tokenizer."""
    return MLXModel(build_module(architecture, seed, dtype), tokenizer(), {"architecture": architecture, "seed": seed})
