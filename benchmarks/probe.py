"""What a probe is: options, a header, and units of work that yield rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.models import BenchModel, Prompt, load, read_prompts
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec, TaskSpec
from lookahead.errors import InvalidArgumentError

RANDOM = "random"
RANDOM_CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""A Llama of 461 million parameters, 923 MB in bfloat16."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": RANDOM_CONFIG,
    "granite": {
        **RANDOM_CONFIG,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 24,
        "num_local_experts": 0,
        "shared_intermediate_size": 2816,
        "attention_multiplier": 0.015625,
        "position_embedding_type": "nope",
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "tie_word_embeddings": True,
    },
    "bart": {
        "model_type": "bart",
        "num_hidden_layers": 12,
        "max_position_embeddings": 2048,
        "forced_eos_token_id": None,
    },
}
"""Models with random weights by family: the Llama, a hybrid with the shapes of Granite 4, of whose layers every sixth
has attention and the others a Mamba 2 state, 417 million parameters, and BART, whose encoder reads the prompt."""

FAST_PRODUCTS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
"""Instruction sets that decide how fast a CPU multiplies matrices, as the system names them."""


@dataclass(frozen=True)
class Unit:
    """Work that is done as a whole: its rows are kept together, or it is done again.

    Attributes:
        name: What tells it from other units of the probe.
        measure: Does it, and gives its rows. A row with a text under `"error"` says what is wrong with what it found.
    """

    name: str
    measure: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Probe:
    """What is to be measured.

    Attributes:
        units: In the order in which they are done.
        header: What the figures depend on besides the machine and the versions of libraries.
        writes: Whether this process keeps the rows; of several ranks one does.
    """

    units: Sequence[Unit]
    header: Mapping[str, Any] = field(default_factory=dict)
    writes: bool = True


def option(default: Any, help: str) -> Any:
    """An option of a probe, for a field of its `Options`; lists are given with blanks between their elements."""
    return field(default=default, metadata={"help": help})


def load_model(name: str, dtype: str) -> BenchModel:
    """A model on the CPU: `"demo"`, `"random"` for `RANDOM_CONFIG`, or that of a folder.

    Raises:
        InvalidArgumentError: It cannot be loaded.
    """
    if name == RANDOM:
        spec = ModelSpec("random Llama", None, random=RANDOM_CONFIG, dtype=dtype)
    else:
        spec = ModelSpec(Path(name).name, name if name == "demo" else Path(name), dtype=dtype)
    return load(spec, torch.device("cpu"))


def random_model(family: str, layers: int | None, hidden_size: int, dtype: str) -> BenchModel:
    """A model of one of `FAMILIES`, with so many layers, or as many as it has there.

    Raises:
        InvalidArgumentError: There is no such family.
    """
    if family not in FAMILIES:
        raise InvalidArgumentError(f"--family {family!r} is none of {', '.join(map(repr, FAMILIES))}")
    sizes = {**FAMILIES[family], "hidden_size": hidden_size}
    sizes["num_hidden_layers"] = count = layers or sizes["num_hidden_layers"]
    name = {"llama": "random Llama", "bart": "random BART"}.get(family, "random Granite hybrid")
    if family == "bart":
        sizes["decoder_layers"] = count
    if family == "granite":
        kinds = ["full_attention" if number % 6 == min(5, count - 1) else "linear_attention" for number in range(count)]
        sizes |= {"layer_types": kinds, "mamba_n_heads": 2 * hidden_size // sizes["mamba_d_head"]}
    return load(ModelSpec(name, None, random=sizes, dtype=dtype), torch.device("cpu"))


def prompts_of(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, or the first so many.

    Raises:
        InvalidArgumentError: It holds something else.
    """
    return read_prompts(TaskSpec(path.stem, path), limit)


def generate(model: Any, ids: torch.Tensor, config: LookaheadConfig | None, **arguments: Any) -> tuple[list[int], Any]:
    """Continue a text, `[1, S]`, greedily unless `arguments` say otherwise: by transformers where there is no `config`.

    Returns:
        The new tokens, and all that the call returned.
    """
    call = model.generate if config is None else partial(lookahead.generate, model, lookahead_config=config)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "return_dict_in_generate": True}
    output = call(ids, **settings | arguments)
    return output.sequences[0, text_start(model, ids.shape[1]) :].tolist(), output


def text_start(model: PreTrainedModel, prompt: int) -> int:
    """Tokens before the new ones in what is returned for so many of a prompt: one where an encoder reads it."""
    return 1 if model.config.is_encoder_decoder else prompt


def token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, text: str) -> torch.Tensor:
    """The tokens of a text where the model is, `[1, S]`."""
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids.to(model.device)


def instruction_sets() -> list[str]:
    """Those of `FAST_PRODUCTS` that this CPU has; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":", 1)[1].split()}
    return [name for name in FAST_PRODUCTS if name in flags]
