"""The optimizers and their learning rates."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM

from demo_training.settings import TrainingError, TrainingSettings

MUON_AND_ADAMW = "muon"
ADAMW_ONLY = "adamw"


def choose_optimizer(name: str) -> str:
    """Resolve `auto` early, as optimizers cannot load each other's checkpoints."""
    available = hasattr(torch.optim, "Muon")
    if name == MUON_AND_ADAMW and not available:
        raise TrainingError(
            f"--optimizer muon needs torch.optim.Muon, which torch {torch.__version__} lacks: install torch "
            "2.9 or later, or give --optimizer adamw"
        )
    if name == "auto":
        return MUON_AND_ADAMW if available else ADAMW_ONLY
    return name


def build_optimizers(model: LlamaForCausalLM, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest.

    The embedding is two-dimensional too, but a table of rows, not a map between spaces. Muon's orthogonal updates only
    suit maps.
    """
    if settings.optimizer == ADAMW_ONLY:
        return [_adamw(list(model.parameters()), settings.adamw_lr)]
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = torch.optim.Muon(matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=0.0)
    return [muon, _adamw(rest, settings.adamw_lr)]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Return the share of the full learning rate: 1, then a linear decay to 0 one step after the last."""
    done = step / settings.steps
    if done < settings.decay_from:
        return 1.0
    return (1 - done) / (1 - settings.decay_from)


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set each learning rate to this share of its full value."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("full_lr", group["lr"]) * factor
