"""Models of the benchmarks: with trained weights, or with random weights in the shapes of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lookahead.demo import demo_model_path

SMALL: dict[str, Any] = {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 8192}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "num_local_experts": 4,
}
HALF_BILLION: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
}

RANDOM: dict[str, dict[str, Any]] = {
    "random": HALF_BILLION,
    "hard": SMALL | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    "forced": SMALL | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "tiny": SMALL | {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 1, "num_attention_heads": 1},
    # Granite 4: every sixth layer has attention, the others a Mamba 2 state.
    "hybrid": HALF_BILLION
    | {
        "model_type": "granitemoehybrid",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "layer_types": [*["linear_attention"] * 5, "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 2816,
        "attention_multiplier": 0.015625,
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "tie_word_embeddings": True,
    },
    "91m": SMALL | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "460m": SMALL
    | {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12},
    "qwen3": TINY | {"model_type": "qwen3"},
    "gemma3": TINY | {"model_type": "gemma3_text"},
    "mixtral": TINY | {"model_type": "mixtral"},
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
"""Shapes of models with random weights by name: `random` is a Llama of 461 million parameters, 923 MB in bfloat16, `8b`
has the shapes of Llama 3.1 8B."""

TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
"""Special tokens of random models; none ends a text."""


def load_model(name: str, dtype: str = "float32", device: str = "cpu", ends: bool = True) -> Any:
    """Load a model: `demo`, one of `RANDOM`, or a model folder.

    Args:
        name: Name or folder of the model.
        dtype: Number type of the weights.
        device: Device of the model; random weights are made there.
        ends: Whether trained models keep their end-of-sequence token.
    """
    if name in RANDOM:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**RANDOM[name], **TOKENS)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=getattr(torch, dtype), local_files_only=True)
    model.to(device).eval()
    model.generation_config.pad_token_id = 0
    if not ends:
        model.generation_config.eos_token_id = None
    return model


def model_folder(name: str) -> Path:
    """Folder of a model with trained weights; for a random model the folder of its tokenizer."""
    return Path(demo_model_path()) if name == "demo" or name in RANDOM else Path(name)


def load_tokenizer(name: str) -> Any:
    """Tokenizer of a model; random models use the demo model's."""
    return AutoTokenizer.from_pretrained(model_folder(name), local_files_only=True)


def save_random(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Save one of `RANDOM` with the demo model's tokenizer, for programs that read files, and return the folder."""
    model, tokenizer = load_model(name, dtype), load_tokenizer(name)
    model.config.update({"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id})
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder
