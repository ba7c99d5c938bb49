"""GGUF files for tests, of the zoo's models and the demo model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig, PreTrainedConfig, PreTrainedModel

from model_zoo import VOCAB_SIZE, build

REASON = "llama-cpp-python is not installed; `make test-gguf` compiles it, and runs these tests"
_TOOL = Path(__file__).parents[2] / "tools" / "convert_to_gguf.py"


def tool() -> ModuleType:
    """The converter's module, loaded by path because tools/ is not a package."""
    pytest.importorskip("llama_cpp", reason=REASON)
    pytest.importorskip("gguf", reason=REASON)
    name = _TOOL.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _TOOL)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def zoo_file(folder: Path) -> Path:
    """Write the zoo's Llama, which has grouped-query attention, with a tokenizer of single characters."""
    convert = tool().convert
    model = build("llama")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
    tokens = ["<end>", "ab", *map(chr, range(ord("!"), ord("!") + VOCAB_SIZE - 2))]
    tokenizer = {
        "added_tokens": [{"id": 0, "content": tokens[0], "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"single": [{"Sequence": {"id": "A", "type_id": 0}}]},
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "merges": [["a", "b"]],
            "vocab": {token: number for number, token in enumerate(tokens)},
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert(folder, folder / "zoo.gguf")
    return folder / "zoo.gguf"


def mamba_file(path: Path) -> PreTrainedModel:
    """Write a tiny Mamba, with running states in all layers; return the transformers model."""
    model = _random(MambaConfig(state_size=8, num_hidden_layers=2, time_step_rank=4, conv_kernel=4, **_SIZES))
    config, weights = model.config, _weights(model)
    writer = _writer(path, "mamba", config)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    tensors = {"token_embd.weight": weights["backbone.embeddings.weight"]}
    tensors["output_norm.weight"] = weights["backbone.norm_f.weight"]
    names = {"in_proj.weight": "ssm_in.weight", "conv1d.bias": "ssm_conv1d.bias", "x_proj.weight": "ssm_x.weight"}
    names |= {"dt_proj.weight": "ssm_dt.weight", "dt_proj.bias": "ssm_dt.bias", "D": "ssm_d"}
    names |= {"out_proj.weight": "ssm_out.weight", "conv1d.weight": "ssm_conv1d.weight"}
    for layer in range(config.num_hidden_layers):
        start = f"backbone.layers.{layer}"
        tensors[f"blk.{layer}.attn_norm.weight"] = weights[f"{start}.norm.weight"]
        tensors[f"blk.{layer}.ssm_a"] = -np.exp(weights[f"{start}.mixer.A_log"])
        for name, target in names.items():
            tensors[f"blk.{layer}.{target}"] = weights[f"{start}.mixer.{name}"]
    _write(writer, tensors)
    return model


def hybrid_file(path: Path) -> PreTrainedModel:
    """Write a tiny LFM2, with running states in some layers and keys and values in others; return the model."""
    model = _random(
        Lfm2Config(
            block_auto_adjust_ff_dim=False,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            max_position_embeddings=512,
            **_SIZES,
        )
    )
    config, weights = model.config, _weights(model)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer = _writer(path, "lfm2", config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * attend for attend in attends])
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    tensors = {"token_embd.weight": weights["model.embed_tokens.weight"]}
    tensors["token_embd_norm.weight"] = weights["model.embedding_norm.weight"]
    names = {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate"}
    names |= {"feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"}
    attention = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "out_proj": "attn_output"}
    attention |= {"q_layernorm": "attn_q_norm", "k_layernorm": "attn_k_norm"}
    attention = {f"self_attn.{name}": target for name, target in attention.items()}
    short = {"in_proj": "shortconv.in_proj", "conv": "shortconv.conv", "out_proj": "shortconv.out_proj"}
    short = {f"conv.{name}": target for name, target in short.items()}
    for layer, attend in enumerate(attends):
        for name, target in (names | (attention if attend else short)).items():
            tensors[f"blk.{layer}.{target}.weight"] = weights[f"model.layers.{layer}.{name}.weight"]
    _write(writer, tensors)
    return model


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _random(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(4)  # otherwise one token is likely everywhere
    return model


def _weights(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    return {name: weight.detach().numpy().squeeze() for name, weight in model.state_dict().items()}


def _writer(path: Path, architecture: str, config: PreTrainedConfig) -> Any:
    tool()
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<end>", "ab", *map(chr, range(ord("!"), ord("!") + VOCAB_SIZE - 2))])
    writer.add_token_types([3, *[1] * (VOCAB_SIZE - 1)])
    writer.add_token_merges(["a b"])
    return writer


def _write(writer: Any, tensors: dict[str, NDArray[np.float32]]) -> None:
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
