"""Tiny random models of many architectures, built from transformers' own configurations.

A test of exactness needs a good text. Freshly initialised models repeat one token forever and hardly use their
context, so a wrong attention mask would stay undetected. The weights here are therefore larger, and the vocabulary
projection is scaled until the logits have a fixed, wide spread:

* near-ties, which float32 rounding may decide, become rare;
* attention matters: changing an early token changes the text;
* the embedding of the last token matters too, so short runs of tokens recur, and an earlier n-gram is often right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.miniature import quiet
from lookahead.demo import demo_model_path
from tiny.variant import Variant
from tiny.weights import draw_weights

VOCAB_SIZE = 72
SLIDING_WINDOW = 8
"""Sliding window, much shorter than the texts of the tests."""
MAX_POSITIONS = 96
"""Size of learned position tables; short enough that tests reach the end."""
ROPE_CONTEXT = 32
"""Shortest text with length-dependent RoPE scaling."""
LOGIT_SPREAD = 4.0
"""Standard deviation of the logits after scaling."""

_SLIDING_FULL = ["sliding_attention", "full_attention"]
_GROUPED = {"num_key_value_heads": 2}
# If all layers slide, a token sees at most layers times window tokens; so use one layer more.
_SLIDING = {**_GROUPED, "sliding_window": SLIDING_WINDOW, "num_hidden_layers": 3}
_MIXED = {**_GROUPED, "sliding_window": SLIDING_WINDOW, "layer_types": _SLIDING_FULL}
_DYNAMIC_ROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ROPE_CONTEXT,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "factor": 4.0,
    "original_max_position_embeddings": ROPE_CONTEXT,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Architecture:
    """Architecture of a model in the zoo.

    Attributes:
        model_type: transformers' name of the architecture.
        overrides: Configuration values beyond the common ones.
        embedding_gain: Spread of the token embeddings. A larger spread gives the last token more weight against
            attention, so more n-grams recur.
        attention: Attention implementations of the architecture.
    """

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    embedding_gain: float = 2.0
    attention: tuple[str, ...] = ("sdpa", "eager")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _GROUPED),
    "llama_dynamic_rope": Architecture("llama", {**_GROUPED, "rope_parameters": _DYNAMIC_ROPE}),
    "mistral_sliding": Architecture("mistral", _SLIDING, 2.5),
    "qwen2": Architecture("qwen2", _GROUPED),
    "qwen2_mixed_sliding": Architecture(
        "qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1}, 2.5
    ),
    "qwen3": Architecture("qwen3", {**_GROUPED, "head_dim": 16}),
    "gemma": Architecture("gemma", {"num_key_value_heads": 1, "head_dim": 16}, 0.6),
    "gemma2": Architecture(
        "gemma2",
        {
            **_MIXED,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
        0.6,
        ("eager",),  # sdpa does not apply the soft cap
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_MIXED,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        0.6,
    ),
    "gemma4": Architecture(  # the last two layers share the keys and values of the first two
        "gemma4_text",
        {
            **_MIXED,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "layer_types": [*_SLIDING_FULL, *_SLIDING_FULL],
        },
        0.6,
    ),
    "phi": Architecture("phi"),
    "phi3": Architecture("phi3", _GROUPED),
    "phi3_long_rope": Architecture(
        "phi3", {**_GROUPED, "original_max_position_embeddings": ROPE_CONTEXT, "rope_parameters": _LONG_ROPE}
    ),
    "gpt2": Architecture("gpt2", {"max_position_embeddings": MAX_POSITIONS}),
    "gpt_bigcode": Architecture("gpt_bigcode", {"max_position_embeddings": MAX_POSITIONS}),
    "gpt_neox": Architecture("gpt_neox", embedding_gain=4.0),
    "gptj": Architecture("gptj", {"rotary_dim": 4}, 4.0, ("eager",)),
    "opt": Architecture("opt", {"word_embed_proj_dim": 48, "ffn_dim": 64, "max_position_embeddings": MAX_POSITIONS}),
    "falcon_new": Architecture("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon_multi_query": Architecture("falcon", {"multi_query": True, "alibi": False, "parallel_attn": True}),
    "mixtral": Architecture("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen3_moe": Architecture("qwen3_moe", {**_GROUPED, **_MIXTURE, "head_dim": 16, "num_experts": 4}),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        {
            **_MIXTURE,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        2.5,
    ),
    "gpt_oss": Architecture(
        "gpt_oss", {**_MIXED, "head_dim": 16, "num_local_experts": 4}, 2.5, ("eager",)
    ),  # attention sinks: no sdpa
    "starcoder2_sliding": Architecture("starcoder2", _SLIDING, 2.5),
    "cohere": Architecture("cohere", _GROUPED),
    "cohere2": Architecture("cohere2", _MIXED, 2.5),
    "olmo2": Architecture("olmo2", _GROUPED),
    "olmo3": Architecture("olmo3", _MIXED),
    "stablelm": Architecture("stablelm", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "granite": Architecture("granite", _GROUPED, 4.0),
    "smollm3": Architecture("smollm3", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "ministral": Architecture("ministral", {**_MIXED, "head_dim": 16}, 2.5),
    "exaone4": Architecture("exaone4", _MIXED),
    "glm4": Architecture("glm4", {**_GROUPED, "head_dim": 16}),
    "nemotron": Architecture("nemotron", _GROUPED, 3.0),
    "llama4_chunked": Architecture(
        "llama4_text",
        {
            **_GROUPED,
            "head_dim": 16,
            "attention_chunk_size": SLIDING_WINDOW,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        2.5,
    ),
}


DEMO = "demo"
"""Name of the demo model, which is trained and has a vocabulary of thousands of tokens."""


@cache
def build(name: str, seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    """Return the model `name` with the weights of `seed`, in float32 and evaluation mode; the same object each time."""
    if name == DEMO:
        model = in_type(DEMO, torch.float32)
        model.generation_config.eos_token_id = None  # as in the zoo: cases set their own
        return model
    architecture = ARCHITECTURES[name]
    with quiet():
        config = _config(architecture)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    variant = Variant(seed, embedding_gain=architecture.embedding_gain, spread=LOGIT_SPREAD, vocabulary=VOCAB_SIZE)
    draw_weights(model.eval(), variant)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, token, None)
    return model


def in_type(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new copy of the zoo's model `name`, or of the demo model, in another number type."""
    if name == DEMO:
        return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype, local_files_only=True).eval()
    model = build(name, attention=ARCHITECTURES[name].attention[0])
    copy = type(model)(model.config).to(dtype).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy


def position_limit(name: str) -> int | None:
    """Return the number of learned positions of a model; None for other kinds of positions."""
    limit = ARCHITECTURES[name].overrides.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    """Return the `new_tokens` that `model.generate` adds to `prompt`."""
    if not new_tokens:
        return ()
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def _config(architecture: Architecture) -> PreTrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **architecture.overrides,
    }
    config = AutoConfig.for_model(architecture.model_type, **values)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config
