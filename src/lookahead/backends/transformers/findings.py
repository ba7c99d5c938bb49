"""What was found by trying on this machine, kept on disk for later processes: it takes longer than a short call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lookahead.backends.transformers.cost_store import device_name
from lookahead.backends.transformers.json_file import cache_folder, file_about, read_about, write_about
from lookahead.version import __version__

_FORMAT = 2
"""Another number whenever something else is tried than before, or something else computed."""

_DISPATCH = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
"""Beginnings of the names of environment variables by which libraries choose their kernels."""

_KNOWN = {"torch", "transformers", "lookahead", "builtins"}
"""Where the classes of models come from whose code does not change while versions stay."""


def recall(about: Mapping[str, Any]) -> Any:
    """What was found on a machine like this one about plain values; `None` if nothing was, or it cannot be read."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError, ValueError):
        return read_about(file_about(folder(), setting), setting).get("found")
    return None


def remember(about: Mapping[str, Any], found: Any) -> None:
    """Store a finding, where that is possible; otherwise it is found again."""
    setting = {**about, "machine": _machine()}
    with suppress(OSError):
        write_about(file_about(folder(), setting), setting, {"found": found})


def folder() -> Path:
    """The folder of the findings."""
    return cache_folder("findings")


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
        "instructions": _instructions(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkldnn": bool(getattr(torch.backends.mkldnn, "enabled", True)),
        "precision": torch.get_float32_matmul_precision(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_DISPATCH)},
        "versions": {
            "lookahead": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


@cache
def _instructions() -> str:
    """A name for the set of instructions and the model of this processor, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    first = lines[: lines.index("") if "" in lines else None]
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "cache size", "CPU ")
    return hashlib.sha256("\n".join(line for line in first if line.startswith(keys)).encode()).hexdigest()[:20]
