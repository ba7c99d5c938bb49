"""Where measured cost models are kept between runs: one JSON file for each model, device and set of versions."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lookahead.backends.transformers.json_file import cache_folder, file_about, read_about, write_about
from lookahead.config import LookaheadConfig
from lookahead.core.step_costs import StepCosts
from lookahead.errors import InvalidArgumentError
from lookahead.version import __version__

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


@dataclass(frozen=True)
class StoredCost:
    """What one file holds.

    Attributes:
        cost: The curve.
        details: What else was measured, as plain numbers and lists: the points, the memory limit, the date.
    """

    cost: StepCosts
    details: dict[str, Any] = field(default_factory=dict)


class CostStore:
    """The cost models of one user.

    A file that cannot be read as what it should be is ignored, with a warning that names it. A file appears whole or
    not at all, so processes may read and write at the same time; the last one to write wins.

    Args:
        folder: Where the files are; the folder `cost` in the user's cache directory if not given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def path(self, setting: Mapping[str, Any]) -> Path:
        """The file for a setting, whether or not there is one yet."""
        return file_about(self.folder, setting)

    def load(self, setting: Mapping[str, Any]) -> StoredCost | None:
        """What is stored for a setting (see `describe_setting`), `None` if nothing that can be used."""
        path = self.path(setting)
        try:
            stored = read_about(path, setting)
            return StoredCost(StepCosts.from_dict(stored["cost"]), dict(stored["details"]))
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError, InvalidArgumentError) as error:
            warnings.warn(
                f"{path} is no cost model that can be used ({type(error).__name__}: {error}) and is ignored; "
                "`lookahead tune` writes it anew",
                stacklevel=2,
            )
            return None

    def save(self, setting: Mapping[str, Any], stored: StoredCost) -> Path:
        """Store a curve for a setting, in place of an earlier one; returns the file.

        Raises:
            OSError: The folder cannot be made or written to.
        """
        path = self.path(setting)
        write_about(path, setting, {"cost": stored.cost.to_dict(), "details": stored.details})
        return path


def default_folder() -> Path:
    """The folder of cost models in the user's cache directory, as the operating system has it."""
    return cache_folder("cost")


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
        "versions": {
            "lookahead": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def engine_setting(config: LookaheadConfig) -> dict[str, Any]:
    """The options of the engine that change how fast it is, by name."""
    setting: dict[str, Any] = {"pack_weights": config.pack_weights}
    if config.engine not in ("auto", "dynamic"):
        setting["engine"] = config.engine
    if config.invariant:
        setting["invariant"] = True
    return setting


def device_name(device: torch.device) -> str:
    """The name of the processor behind `device`; two GPUs of the same make are the same."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
