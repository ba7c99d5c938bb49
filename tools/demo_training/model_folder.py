"""The finished model, in a folder for `from_pretrained`."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from demo_training.settings import TrainingSettings
from demo_training.token_data import TokenData
from demo_training.tokenizer import as_transformers_tokenizer
from demo_training.trainer import TrainingRun

RECORD_NAME = "training.json"


def write_model_folder(
    output: Path, run: TrainingRun, data: TokenData, settings: TrainingSettings, device: torch.device
) -> None:
    """Write weights, tokenizer and record; the record is last, so a folder with a record is complete."""
    partial = output / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    run.model.to(getattr(torch, settings.save_dtype)).save_pretrained(partial)
    as_transformers_tokenizer(data.tokenizer, settings.max_positions).save_pretrained(partial)
    for file in sorted(partial.iterdir()):
        os.replace(file, output / file.name)
    partial.rmdir()
    record = json.dumps(training_record(run, data, settings, device), indent=1, ensure_ascii=False)
    (output / RECORD_NAME).write_text(record + "\n", encoding="utf-8")


def training_record(
    run: TrainingRun, data: TokenData, settings: TrainingSettings, device: torch.device
) -> dict[str, Any]:
    """Return the facts that describe the training and allow to repeat it."""
    used = settings.as_dict()
    # Only the names of folders: a model folder is shared, and paths are private.
    used["source"] = [Path(source).name for source in settings.source] or ["running environment"]
    used["start_from"] = Path(settings.start_from).name
    return {
        "parameters": run.model.num_parameters(),
        "data": {name: value for name, value in data.facts.items() if name != "dtype"},
        "tokens_seen": run.step * settings.batch_tokens,
        "final_train_loss": round(run.recent_loss, 4),
        "validation_loss": run.validations[-1]["validation_loss"],
        "minutes": round(run.seconds / 60, 1),
        "device": _device_name(device),
        "settings": used,
        "losses": run.validations,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        },
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, threads: {torch.get_num_threads()})"
