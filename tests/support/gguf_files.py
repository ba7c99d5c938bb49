"""GGUF files for tests: models of the zoo, and the demo model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from model_zoo import VOCAB_SIZE, build

REASON = "llama-cpp-python is not installed; `make test-gguf` compiles it, and runs these tests"
_TOOL = Path(__file__).parents[2] / "tools" / "convert_to_gguf.py"


def tool() -> ModuleType:
    """The converter's module; tools/ is no package, so it is loaded by path."""
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
    """The zoo's Llama, whose key-value heads serve several query heads, with one token for each of some characters."""
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


def recurrent_file(path: Path) -> Path:
    """A tiny Mamba, with weights of zero."""
    tool()
    import gguf
    import numpy as np

    width, inner, state, rank, kernel = 32, 64, 8, 4, 4
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<end>", "ab", *"abcdef"])
    writer.add_token_types([3, *[1] * 7])
    writer.add_token_merges(["a b"])
    shapes = {
        "token_embd.weight": (8, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
