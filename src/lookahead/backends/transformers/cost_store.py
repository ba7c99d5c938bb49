"""Costs that `lookahead tune` measured: one file for each model, device and set of versions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.findings import (
    cache_folder,
    device_name,
    file_about,
    read_about,
    versions,
    write_about,
)
from lookahead.config import LookaheadConfig
from lookahead.core.step_costs import StepCosts
from lookahead.errors import InvalidArgumentError

_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "tie_word_embeddings",
)
"""What a configuration says that decides how long a step takes; two fine-tunings of a model share a curve."""


def cost_file(setting: Mapping[str, Any]) -> Path:
    """The file of the costs for a setting (see `describe_setting`), whether or not there is one yet."""
    return file_about(cache_folder("cost"), setting)


def load_costs(setting: Mapping[str, Any]) -> StepCosts | None:
    """What is stored for a setting; `None` if nothing that can be used. A file that cannot be read as what it should be
    is ignored, with a warning that names it."""
    path = cost_file(setting)
    try:
        return StepCosts.from_dict(read_about(path, setting)["cost"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, InvalidArgumentError) as error:
        warnings.warn(
            f"{path} is no cost model that can be used ({type(error).__name__}: {error}) and is ignored; "
            "`lookahead tune` writes it anew",
            stacklevel=2,
        )
        return None


def store_costs(setting: Mapping[str, Any], costs: StepCosts, details: Mapping[str, Any]) -> Path:
    """Store a curve for a setting, in place of an earlier one; returns the file, which is written whole or not at all.

    Args:
        setting: See `describe_setting`.
        costs: The curve.
        details: What else was measured, as plain numbers and lists: the points, the memory limit, the date.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    path = cost_file(setting)
    write_about(path, setting, {"cost": costs.to_dict(), "details": dict(details)})
    return path


def describe_setting(model: PreTrainedModel, engine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that the time of a step depends on but its nodes and context, as plain values: the key of a stored curve.

    Args:
        model: The model, on its device.
        engine: See `engine_setting`.
    """
    config = model.config.get_text_config(decoder=True)
    weights = list(model.parameters())
    return {
        "model": {
            "class": type(model).__name__,
            # as a dict: some configurations refuse to name a size that differs between layers
            **{name: value for name, value in config.to_dict().items() if name in _SIZES and value is not None},
            "parameters": sum(weight.numel() for weight in weights),
            "bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "device": device_name(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else None,
        "engine": dict(engine or {}),
        "versions": versions(),
    }


def engine_setting(config: LookaheadConfig) -> dict[str, Any]:
    """The options of the engine that change how fast it is, by name."""
    setting: dict[str, Any] = {"pack_weights": config.pack_weights}
    if config.engine not in ("auto", "dynamic"):
        setting["engine"] = config.engine
    if config.invariant:
        setting["invariant"] = True
    return setting
