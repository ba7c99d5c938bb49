"""What is kept for a model between calls: what its steps cost, and what was learned about its predictions."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.cost_model import CostModel
from lookahead.cost_store import CostStore, describe_setting
from lookahead.drafting import DraftMemory, Neighbours
from lookahead.drafting.neighbours import COORDINATES
from lookahead.errors import InvalidArgumentError
from lookahead.identity import model_identity


@dataclass
class _ModelState:
    costs: dict[str, CostModel] = field(default_factory=dict)
    memories: dict[str, DraftMemory] = field(default_factory=dict)
    neighbours: list[Neighbours | None] = field(default_factory=list)  # none or one


_states: WeakKeyDictionary[PreTrainedModel, _ModelState] = WeakKeyDictionary()


def step_costs(model: PreTrainedModel, config: LookaheadConfig, rows: int) -> CostModel:
    """What steps of `model` cost: as learned in earlier calls, else as `lookahead tune` stored it, else a first guess.

    Args:
        model: The model.
        config: How its engine is set.
        rows: Sequences that run together.
    """
    engine = {} if config.engine == "dynamic" else {"engine": config.engine}
    setting = describe_setting(model, {"pack_weights": config.pack_weights, **engine})
    costs = _states.setdefault(model, _ModelState()).costs
    key = f"{rows} {sorted(setting.items())}"
    if key not in costs:
        stored = CostStore().load(setting)
        costs[key] = CostModel.prior() if stored is None else stored.cost
    return costs[key]


def neighbours(model: PreTrainedModel) -> Neighbours | None:
    """Which tokens the input embedding of `model` treats alike, worked out once.

    Returns:
        `None` where the embedding cannot be read as plain numbers: quantised, shared out among processes, not loaded.
    """
    known = _states.setdefault(model, _ModelState()).neighbours
    if not known:
        known.append(_make_neighbours(getattr(model.get_input_embeddings(), "weight", None)))
    return known[0]


def _make_neighbours(weight: object) -> Neighbours | None:
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return None
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta or weight.ndim != 2 or not weight.is_floating_point():
        return None
    step = max(1, weight.shape[1] // COORDINATES)
    return Neighbours(weight.detach()[:, ::step][:, :COORDINATES].float().cpu().numpy())


def draft_memory(model: PreTrainedModel, config: LookaheadConfig) -> DraftMemory:
    """The memory that a call drafts from and fills: a new one, or that of `config.memory`.

    Raises:
        InvalidArgumentError: The file is no memory, or that of another model, or its folder cannot be written to.
        OSError: The file cannot be read.
    """
    if config.memory == "request":
        return DraftMemory()
    memories = _states.setdefault(model, _ModelState()).memories
    if config.memory == "process":
        return memories.setdefault("process", DraftMemory())
    path = _path(config)
    if str(path) not in memories:
        _check_folder(path)
        memories[str(path)] = DraftMemory.load(path, model_identity(model)) if path.exists() else DraftMemory()
    return memories[str(path)]


def keep_memory(model: PreTrainedModel, config: LookaheadConfig, memory: DraftMemory) -> None:
    """Write the memory to its file, if it has one; whole or not at all.

    A file that cannot be written is a warning: the text is there, and worth more.
    """
    if config.memory in MEMORY_SCOPES:
        return
    path = _path(config)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        memory.save(part, model_identity(model))
        os.replace(part, path)
    except OSError as error:
        warnings.warn(f"memory={str(path)!r} could not be written ({error}); the next call begins anew", stacklevel=2)
    finally:
        with suppress(OSError):
            part.unlink()


def _check_folder(path: Path) -> None:
    """Make the folder of a memory: before anything is generated, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written: {error}; choose another folder") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgumentError(f"memory={str(path)!r} cannot be written; choose a file in a folder of yours")


def _path(config: LookaheadConfig) -> Path:
    return Path(os.fspath(config.memory)).expanduser().absolute()
