"""Findings: results of trials and timings on this machine, stored on disk for later processes.

Each finding is a JSON file in the user's cache directory. Its key is a setting of plain values: model, machine,
versions.
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
"""Version of the findings; increase it when a trial or a computation changes."""

_DISPATCH = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
"""Prefixes of environment variables that affect the choice of kernels in libraries."""

_KNOWN = {"torch", "transformers", "lookahead", "builtins"}
"""Packages with code that changes only with their versions."""

_SAMPLED = 16
"""Weights in a model's identity."""
_VALUES = 64
"""Values of each weight in a model's identity."""
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Settings of a configuration that do not identify a model."""


def _file(kind: str, setting: Mapping[str, Any]) -> Path:
    """Return the path of the file for a setting; the file may not exist."""
    text = json.dumps(setting, sort_keys=True)
    return user_cache() / OWN_FOLDER / kind / f"{_short_hash(text)}.json"


def _read(kind: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Read the file for a setting.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a finding, or belongs to another setting.
    """
    content = json.loads(_file(kind, setting).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("setting") != json.loads(json.dumps(setting)):
        raise ValueError("it belongs to another setting")
    return content


def _write(kind: str, setting: Mapping[str, Any], content: Mapping[str, Any]) -> Path:
    """Replace the file for a setting atomically, and return its path.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    path = _file(kind, setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        json.dump({"setting": dict(setting), **content}, file)
    return path


def recall(about: Mapping[str, Any]) -> Any:
    """Return the stored finding about a subject on an equal machine; `None` without one."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError, ValueError):
        return _read("findings", setting).get("found")
    return None


def remember(about: Mapping[str, Any], finding: Any) -> None:
    """Store a finding about a subject, if the disk permits it."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError):
        _write("findings", setting, {"found": finding})


def architecture(model: PreTrainedModel) -> dict[str, Any] | None:
    """Describe everything in a model that affects the order of its sums: all but the values of weights.

    Returns:
        Plain values; `None` if the code may change without a new version, or there are hooks.
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
    """Describe everything in this machine that affects the choice of kernels in libraries."""
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
    """Return the name of this processor, and a hash of its model and instructions if the system has them."""
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
    """Return a short name that identifies a configuration and weights.

    It is a hash of the configuration and of sampled weights. It does not depend on the number type if that represents
    the same values.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _INCIDENTAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weights = sorted(model.named_parameters(), key=lambda item: item[0])
    for name, weight in weights[:: max(1, len(weights) // _SAMPLED)]:
        # The local part of a weight that is distributed over processes (a DTensor).
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        values = part.detach().flatten()
        sample = values[:: max(1, values.numel() // _VALUES)].to(torch.float32).tolist()
        digest.update(f"{name} {tuple(weight.shape)} {sample}".encode())
    return f"{type(model).__name__}-{digest.hexdigest()[:24]}"


def _versions() -> dict[str, str]:
    """Return the versions that affect results and times."""
    return {"lookahead": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def device_name(device: torch.device) -> str:
    """Return the name of the processor or GPU model of `device`."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type if device.type != "cpu" else _processor()[0]


_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size", "layer_types", "num_experts"),
    *("num_local_experts", "num_experts_per_tok", "tie_word_embeddings"),
)
"""Settings of a configuration that affect the time of a step; fine-tuned models share a curve."""


def cost_file(setting: Mapping[str, Any]) -> Path:
    """Return the path of the stored costs for a setting (see `describe_setting`); the file may not exist."""
    return _file("cost", setting)


def load_costs(setting: Mapping[str, Any]) -> StepCosts | None:
    """Return the stored costs for a setting; `None` without any. An invalid file is ignored, with a warning."""
    try:
        return StepCosts.from_dict(_read("cost", setting)["cost"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, InvalidArgumentError) as error:
        warnings.warn(
            f"{cost_file(setting)} is not a usable cost model ({type(error).__name__}: {error}) and is ignored; "
            "`lookahead tune` writes a new one",
            stacklevel=2,
        )
        return None


def store_costs(setting: Mapping[str, Any], costs: StepCosts, details: Mapping[str, Any]) -> Path:
    """Store the costs for a setting atomically, and return the path of the file.

    Args:
        setting: Setting from `describe_setting`.
        costs: The costs.
        details: Further plain values for the file, for example measured points and the date.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    return _write("cost", setting, {"cost": costs.to_dict(), "details": dict(details)})


def describe_setting(model: PreTrainedModel, config: LookaheadConfig) -> dict[str, Any]:
    """Describe everything that affects the time of a step beside its nodes and context: the key of stored costs.

    Args:
        model: The model, on its device.
        config: Configuration; only options with an effect on the speed count.
    """
    engine: dict[str, Any] = {"pack_weights": config.pack_weights}
    captures = model.device.type == "cuda"  # there `engine="auto"` records graphs; elsewhere it means "dynamic"
    if config.engine not in (("auto",) if captures else ("auto", "dynamic")):
        engine["engine"] = config.engine
    if config.invariant:
        engine["invariant"] = True
    text_config = model.config.get_text_config(decoder=True)
    return {
        "model": {
            "class": type(model).__name__,
            # as a dict: some configurations raise for a size that differs between layers
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
