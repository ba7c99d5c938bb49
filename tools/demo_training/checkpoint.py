"""Checkpoints of a stopped run, written atomically."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from demo_training.settings import TrainingError, TrainingSettings
from demo_training.trainer import TrainingRun

CHECKPOINT_NAME = "checkpoint.pt"


def save_checkpoint(path: Path, run: TrainingRun, settings: TrainingSettings, data_key: str) -> None:
    """Write a new file and replace the old checkpoint by it, so that a crash cannot leave half a file."""
    device = run.model.device
    state = {
        "settings": settings.as_dict(),
        "data_key": data_key,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "losses": run.losses,
        "validations": run.validations,
        "seconds": run.seconds,
        "own_texts": run.own_texts,
        # Nothing draws random numbers after initialisation today; dropout would.
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as output:
        torch.save(state, output)
        output.flush()
        os.fsync(output.fileno())
    os.replace(partial, path)


def read_checkpoint(path: Path, settings: TrainingSettings) -> dict[str, Any] | None:
    """Return the saved state, or `None`; a state of other settings is refused."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        differences = settings.differences(state["settings"])
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"--output {path.parent} holds a checkpoint that cannot be read ({error}): give --no-resume to "
            "train from the start and replace it"
        ) from error
    if differences:
        raise TrainingError(
            f"--output {path.parent} holds a checkpoint of other settings: {', '.join(differences)}. Give "
            "the same settings to continue it, another --output to keep it, or --no-resume to train from the "
            "start and replace it"
        )
    return state


def restore_checkpoint(run: TrainingRun, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint's state."""
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.losses = state["losses"]
    run.validations = state["validations"]
    run.seconds = state["seconds"]
    run.own_texts = state["own_texts"]
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"], run.model.device)
