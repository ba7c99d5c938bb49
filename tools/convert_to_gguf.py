#!/usr/bin/env python
"""Write a Llama checkpoint of transformers as a GGUF file, for llama.cpp and everything built on it.

    python tools/convert_to_gguf.py src/lookahead/demo_model demo-f32.gguf
    python tools/convert_to_gguf.py my-model my-model-q4.gguf --type q4_k_m

Made for the small models of this project: the Llama architecture, with a byte-level BPE tokenizer like GPT-2's, or one
with byte fallback like Llama 2's. Needs the package gguf, and llama-cpp-python for `q4_k_m`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from numpy.typing import NDArray
from safetensors import safe_open

from lookahead.backends.llama_cpp.context import binding, error_lines

EXIT_REFUSED = 2

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""Number type of the matrices, and file type in the header. Vectors stay float32."""

BY_LLAMA_CPP = {"q4_k_m": LlamaFileType.MOSTLY_Q4_K_M}
"""Mixtures of types, which llama.cpp chooses tensor by tensor."""


class ConversionError(ValueError):
    """A checkpoint that this tool does not know how to write."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--type", choices=[*TYPES, *BY_LLAMA_CPP], default="f32", help="number type (default: f32)")
    values = parser.parse_args(arguments)
    try:
        convert(values.model, values.output, values.type)
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def convert(folder: Path, output: Path, kind: str = "f32") -> None:
    """Write the checkpoint in `folder` to the file `output`.

    Args:
        folder: With `config.json`, `model.safetensors` and `tokenizer.json`.
        output: The file to write.
        kind: A number type of `TYPES` or `BY_LLAMA_CPP`.

    Raises:
        ConversionError: The tool does not support the checkpoint, or `output` exists and is no GGUF file.
    """
    if output.exists() and output.read_bytes()[:4] not in (b"", b"GGUF"):
        raise ConversionError(f"{output} is no GGUF file, and was left as it is; choose another output")
    if kind in TYPES:
        _write(folder, output, *TYPES[kind])
        return
    with tempfile.TemporaryDirectory() as scratch:
        float32_file = Path(scratch) / "f32.gguf"
        _write(folder, float32_file, *TYPES["f32"])
        _quantize(float32_file, output, BY_LLAMA_CPP[kind])


def _write(folder: Path, output: Path, number_type: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    config = _read(folder / "config.json")
    writer = gguf.GGUFWriter(output, "llama")
    _add_sizes(writer, folder.resolve().name, config)
    writer.add_file_type(file_type)
    _add_tokenizer(writer, _read(folder / "tokenizer.json"), config)
    template = _chat_template(folder)
    if template is not None:
        writer.add_chat_template(template)
    for name, weight in _weights(folder / "model.safetensors", config):
        chosen = number_type if weight.ndim == 2 else GGMLQuantizationType.F32
        if chosen is GGMLQuantizationType.Q8_0 and weight.shape[1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = GGMLQuantizationType.F16  # rows that are no whole number of blocks, as llama.cpp does
        writer.add_tensor(name, gguf.quants.quantize(weight, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    return _read(settings).get("chat_template") if settings.exists() else None


def _add_sizes(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConversionError(f"model_type={config['model_type']!r}: only Llama without biases can be written")
    if rope.get("rope_type", "default") != "default":
        raise ConversionError(f"rope_type={rope['rope_type']!r}: only the default rotary embedding can be written")
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ConversionError(f"tokenizer model {model['type']!r}: only BPE can be written")
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    types = [TokenType.CONTROL if number in special else TokenType.NORMAL for number in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model["byte_fallback"]:
        # llama.cpp merges the pair with the highest score first: the pair learned first.
        rank = {merge.replace(" ", ""): -float(place) for place, merge in enumerate(merges)}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
        types = [TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
        unknown = model["vocab"][model["unk_token"]]
        types[unknown] = TokenType.UNKNOWN
        writer.add_unk_token_id(unknown)
        writer.add_add_space_prefix(True)
    else:
        if tokenizer["pre_tokenizer"] != _GPT2_WORDS:
            raise ConversionError(f"pre_tokenizer={tokenizer['pre_tokenizer']}: only GPT-2's can be written")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token("SpecialToken" in tokenizer["post_processor"]["single"][0])


_GPT2_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _weights(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Names and weights as llama.cpp has them, in float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no dictionary
            weight = file.get_tensor(name).to(torch.float32).numpy()
            if "q_proj" in name:
                weight = _interleaved(weight, config["num_attention_heads"])
            elif "k_proj" in name:
                weight = _interleaved(weight, config["num_key_value_heads"])
            yield names.get_name(name, [".weight"]), np.ascontiguousarray(weight)


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head in the order of llama.cpp, which turns neighbours; transformers turns the halves of a head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _quantize(source: Path, output: Path, file_type: LlamaFileType) -> None:
    llama_cpp = binding()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = int(file_type)
    options.nthread = 1
    with error_lines() as lines:
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(output).encode(), options) != 0
    if failed:
        raise ConversionError(f"llama.cpp could not write {output} as {file_type.name}: {'; '.join(lines)}")


if __name__ == "__main__":
    sys.exit(main())
