"""What is kept for a model between calls: what its steps cost, and what was learned about its predictions."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.cost_store import CostStore, describe_setting
from lookahead.backends.transformers.identity import model_identity
from lookahead.backends.transformers.memory_file import MemoryFile
from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.core.cost_model import CostModel
from lookahead.drafting import DraftMemory, EmbeddingNeighbours
from lookahead.drafting.auto.embedding_neighbours import COORDINATES
from lookahead.errors import InvalidArgumentError, LookaheadWarning


@dataclass
class _ModelState:
    costs: dict[str, CostModel] = field(default_factory=dict)
    memory: DraftMemory | None = None  # of the scope "process"
    files: dict[str, MemoryFile] = field(default_factory=dict)
    neighbours: list[EmbeddingNeighbours | None] = field(default_factory=list)  # none or one
    lock: RLock = field(default_factory=RLock)  # held while one of them is made


_states: WeakKeyDictionary[PreTrainedModel, _ModelState] = WeakKeyDictionary()


def making(model: PreTrainedModel) -> RLock:
    """Held by the thread that makes something for `model` which other calls with it will use."""
    return _state(model).lock


def step_costs(model: PreTrainedModel, config: LookaheadConfig, rows: int) -> CostModel:
    """What steps of `model` cost: as learned in earlier calls, else as `lookahead tune` stored it, else a first guess.

    Args:
        model: The model.
        config: How its engine is set.
        rows: Sequences that run together.
    """
    engine = {} if config.engine == "dynamic" else {"engine": config.engine}
    setting = describe_setting(model, {"pack_weights": config.pack_weights, **engine})
    state = _state(model)
    key = f"{rows} {sorted(setting.items())}"
    with state.lock:
        if key not in state.costs:
            stored = CostStore().load(setting)
            state.costs[key] = CostModel.prior() if stored is None else stored.cost
        return state.costs[key]


def neighbours(model: PreTrainedModel) -> EmbeddingNeighbours | None:
    """Which tokens the input embedding of `model` treats alike, worked out once.

    Returns:
        `None` where the embedding cannot be read as plain numbers: quantised, shared out among processes, not loaded.
    """
    state = _state(model)
    with state.lock:
        if not state.neighbours:
            state.neighbours.append(_make_neighbours(getattr(model.get_input_embeddings(), "weight", None)))
        return state.neighbours[0]


def _make_neighbours(weight: object) -> EmbeddingNeighbours | None:
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return None
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta or weight.ndim != 2 or not weight.is_floating_point():
        return None
    step = max(1, weight.shape[1] // COORDINATES)
    return EmbeddingNeighbours(weight.detach()[:, ::step][:, :COORDINATES].float().cpu().numpy())


def draft_memory(model: PreTrainedModel, config: LookaheadConfig) -> DraftMemory:
    """The memory that a call drafts from and fills: a new one, or that of `config.memory`.

    Raises:
        InvalidArgumentError: The file is no memory, or that of another model, or there cannot be one of that name.
        OSError: The file cannot be read.
    """
    if config.memory == "request":
        return DraftMemory()
    state = _state(model)
    with state.lock:
        if config.memory == "process":
            state.memory = state.memory or DraftMemory()
            return state.memory
        path = _path(config)
        if str(path) not in state.files:
            state.files[str(path)] = MemoryFile(path, model_identity(model))
        return state.files[str(path)].memory


def keep_memory(model: PreTrainedModel, config: LookaheadConfig, memory: DraftMemory) -> None:
    """Bring what `memory` learned to its file, if it has one.

    A file that cannot be written is a warning: the text is there, and worth more.
    """
    if config.memory in MEMORY_SCOPES:
        return
    # Not by its path, which a change of the working directory may have changed.
    for path, file in list(_state(model).files.items()):
        if file.memory is memory:
            try:
                file.save(model_identity(model))
            except (OSError, InvalidArgumentError) as error:
                warnings.warn(
                    f"memory={path!r} could not be written ({error}); what this process has learned since it was last "
                    "written is lost when it ends",
                    LookaheadWarning,
                    stacklevel=2,
                )


def _state(model: PreTrainedModel) -> _ModelState:
    return _states.get(model) or _states.setdefault(model, _ModelState())


def _path(config: LookaheadConfig) -> Path:
    path = os.fspath(config.memory)
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # there is no such user
        raise InvalidArgumentError(f"memory={path!r} cannot be written: {error}; choose another file") from error
