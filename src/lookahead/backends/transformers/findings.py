"""What was found by trying or timing on this machine, kept on disk for later processes: it takes longer than a call.

Each finding is a file of JSON in the user's cache directory, about a setting of plain values: which model, which
machine, which versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.core.files import OWN_FOLDER, replaced, user_cache
from lookahead.core.step_costs import StepCosts
from lookahead.errors import InvalidArgumentError
from lookahead.version import __version__

_FORMAT = 2
"""Another number whenever something else is tried than before, or something else computed."""

_DISPATCH = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
"""Beginnings of the names of environment variables by which libraries choose their kernels."""

_KNOWN = {"torch", "transformers", "lookahead", "builtins"}
"""Where the classes of models come from whose code does not change while versions stay."""

_SAMPLED = 16
_VALUES = 64
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""What a configuration says that is no part of which model it is."""


def _file(kind: str, setting: Mapping[str, Any]) -> Path:
    """The file about a setting of plain values, whether or not there is one yet."""
    text = json.dumps(setting, sort_keys=True)
    return user_cache() / OWN_FOLDER / kind / f"{_short_hash(text)}.json"


def _read(kind: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """What the file about a setting holds.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else, or is about another setting.
    """
    content = json.loads(_file(kind, setting).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("setting") != json.loads(json.dumps(setting)):
        raise ValueError("it is about another setting")
    return content


def _write(kind: str, setting: Mapping[str, Any], content: Mapping[str, Any]) -> Path:
    """Put `content` in place of what the file about a setting held: all of it or, if that fails, nothing.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    path = _file(kind, setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        json.dump({"setting": dict(setting), **content}, file)
    return path


def recall(about: Mapping[str, Any]) -> Any:
    """What was found on a machine like this one about plain values; `None` if nothing was, or it cannot be read."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError, ValueError):
        return _read("findings", setting).get("found")
    return None


def remember(about: Mapping[str, Any], found: Any) -> None:
    """Store a finding, where that is possible; otherwise it is found again."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError):
        _write("findings", setting, {"found": found})


def architecture(model: PreTrainedModel) -> dict[str, Any] | None:
    """All of a model that decides in which order its sums are made, as plain values: anything but the numbers.

    Returns:
        `None` where its code may be another tomorrow, or hooks run with it.
    """
    parts = hashlib.sha256()
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        attributes = vars(module)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
            return None
        if kinds[0].__module__.partition(".")[0] not in _KNOWN or "<locals>" in kinds[0].__qualname__:
            return None
        weights = [(key, tuple(value.shape), str(value.dtype)) for key, value in module.named_parameters(recurse=False)]
        parts.update(repr((name, [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds], weights)).encode())
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_name")}
    parts.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    return {"model": type(model).__name__, "parts": parts.hexdigest(), "dtype": str(model.dtype)}


def _machine() -> dict[str, Any]:
    """All that decides which kernels libraries choose, but for shapes and types."""
    return {
        "format": _FORMAT,
        "processor": device_name(torch.device("cpu")),
        "instructions": _processor()[1],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkldnn": bool(getattr(torch.backends.mkldnn, "enabled", True)),
        "precision": torch.get_float32_matmul_precision(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_DISPATCH)},
        "versions": _versions(),
    }


@cache
def _processor() -> tuple[str, str]:
    """The name of this processor, and one for its set of instructions and its model, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    first = lines[: lines.index("") if "" in lines else None]
    names = [line.split(":", 1)[1].strip() for line in first if line.startswith("model name")]
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "cache size", "CPU ")
    instructions = "\n".join(line for line in first if line.startswith(keys))
    return names[0] if names else platform.processor() or platform.machine(), _short_hash(instructions)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def model_identity(model: PreTrainedModel) -> str:
    """A short name that two models share only if they have the same configuration and the same weights.

    Made from the configuration and from values out of some of the weights. A model keeps its name in another number
    type if that holds the same values; another size, other layers or a fine-tuning change it.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _INCIDENTAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weights = sorted(model.named_parameters(), key=lambda item: item[0])
    for name, weight in weights[:: max(1, len(weights) // _SAMPLED)]:
        # Of a weight that is shared out among processes (a DTensor), this process's part.
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        values = part.detach().flatten()
        sample = values[:: max(1, values.numel() // _VALUES)].to(torch.float32).tolist()
        digest.update(f"{name} {tuple(weight.shape)} {sample}".encode())
    return f"{type(model).__name__}-{digest.hexdigest()[:24]}"


def _versions() -> dict[str, str]:
    """Versions that decide what is computed, and how fast."""
    return {"lookahead": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def device_name(device: torch.device) -> str:
    """The name of the processor behind `device`; two GPUs of the same make are the same."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type if device.type != "cpu" else _processor()[0]


_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size", "layer_types", "num_experts"),
    *("num_local_experts", "num_experts_per_tok", "tie_word_embeddings"),
)
"""What a configuration says that decides how long a step takes; two fine-tunings of a model share a curve."""


def cost_file(setting: Mapping[str, Any]) -> Path:
    """The file of the costs for a setting (see `describe_setting`), whether or not there is one yet."""
    return _file("cost", setting)


def load_costs(setting: Mapping[str, Any]) -> StepCosts | None:
    """What is stored for a setting; `None` if nothing that can be used. A file that cannot be read as what it should be
    is ignored, with a warning that names it."""
    try:
        return StepCosts.from_dict(_read("cost", setting)["cost"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, InvalidArgumentError) as error:
        warnings.warn(
            f"{cost_file(setting)} is no cost model that can be used ({type(error).__name__}: {error}) and is ignored; "
            "`lookahead tune` writes it anew",
            stacklevel=2,
        )
        return None


def store_costs(setting: Mapping[str, Any], costs: StepCosts, details: Mapping[str, Any]) -> Path:
    """Store a curve for a setting, in place of an earlier one; returns the file, which is written whole or not at all.

    Args:
        setting, costs: The curve, and what it is about; see `describe_setting`.
        details: What else was measured, as plain numbers and lists: the points, the date.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    return _write("cost", setting, {"cost": costs.to_dict(), "details": dict(details)})


def describe_setting(model: PreTrainedModel, config: LookaheadConfig) -> dict[str, Any]:
    """All that the time of a step depends on but its nodes and context, as plain values: the key of a stored curve.

    Args:
        model: The model, on its device.
        config: Of which the options count that change how fast its engine is.
    """
    engine: dict[str, Any] = {"pack_weights": config.pack_weights}
    captures = model.device.type == "cuda"  # where `engine="auto"` records graphs; elsewhere it is "dynamic"
    if config.engine not in (("auto",) if captures else ("auto", "dynamic")):
        engine["engine"] = config.engine
    if config.invariant:
        engine["invariant"] = True
    text_config = model.config.get_text_config(decoder=True)
    return {
        "model": {
            "class": type(model).__name__,
            # as a dict: some configurations refuse to name a size that differs between layers
            **{name: value for name, value in text_config.to_dict().items() if name in _SIZES and value is not None},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "bytes": sum(weight.nbytes for weight in model.parameters()),
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(text_config, "_attn_implementation", None),
        "device": device_name(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else None,
        "engine": engine,
        "versions": _versions(),
    }
