"""Everything that is kept for a model between calls, in one object that goes when the model goes."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.cost_store import describe_setting, engine_setting, load_costs
from lookahead.backends.transformers.findings import model_identity
from lookahead.backends.transformers.packed_linear import fastest_packing
from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.step_costs import StepCosts
from lookahead.drafting import DraftMemory, NGramMemory
from lookahead.drafting.memory_file import MemoryFile
from lookahead.errors import InvalidArgumentError, LookaheadWarning

if TYPE_CHECKING:
    from lookahead.backends.transformers.checks.kinds import Equivalence
    from lookahead.backends.transformers.limits import Limits
    from lookahead.backends.transformers.shared_clone import SharedClone
    from lookahead.backends.transformers.static_cache import LayerShape
    from lookahead.backends.transformers.static_steps import StaticSteps

Setting = tuple[object, ...]
"""How a model was set when something was made or tried for it: its attention, number type, device, ..."""


@dataclass(eq=False)
class ModelState:
    """What is kept for one model, outside of it: a copy or a pickle of the model begins without.

    Nothing in here refers to the model, or it would never go. A shared-weight clone is a model of its own, with a state
    of its own.

    Attributes:
        lock: Held by a thread while it looks for something in here and makes it where it is missing.
        checked: Settings with which the tree check passed.
        clones: Shared-weight clones: what each was made of (`structure`), and the clone; in its place why there is
            none, where it did not do what it should.
        static_shapes: What its layers keep of a token; why, where static steps failed, or did not do what others do.
        static_steps: Those that its last call released, and what they were made for: what was compiled and captured
            serves the next call as well.
        packing: Which packing makes its steps shortest, by number type and threads.
        costs: What its steps cost, by setting.
        paces: What its drafts gain, by setting and temperature.
        memory: The n-gram memory of `memory="process"`.
        spare: The n-gram memory of a call that has ended, for the next one to begin anew.
        files: Open memory files, by path.
        layer_weights: How many weights there are beside the embeddings of tokens, once that was asked for.
        limits: What its configuration says of positions and places, and the values that it had.
        equivalence: What was found of its kind lately, and the attention and the configuration that it is about.
    """

    lock: RLock = field(default_factory=RLock)
    checked: set[Setting] = field(default_factory=set)
    clones: dict[Setting, tuple[list[object], SharedClone | str]] = field(default_factory=dict)
    static_shapes: dict[Setting, tuple[LayerShape | None, ...] | str] = field(default_factory=dict)
    static_steps: tuple[Setting, StaticSteps] | None = None
    packing: dict[Setting, bool | str] = field(default_factory=dict)
    costs: dict[Setting, StepCosts] = field(default_factory=dict)
    paces: dict[Setting, Pace] = field(default_factory=dict)
    memory: DraftMemory | None = None
    spare: NGramMemory | None = None
    files: dict[str, MemoryFile] = field(default_factory=dict)
    layer_weights: int | None = None
    limits: dict[bool, tuple[dict[str, object], Limits]] = field(default_factory=dict)
    equivalence: tuple[str | None, dict[str, object], ReferenceType[Equivalence]] | None = None


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()


def state_of(model: PreTrainedModel) -> ModelState:
    """What is kept for `model`; an empty state on first use."""
    return _states.get(model) or _states.setdefault(model, ModelState())


def same_values(first: dict[str, object], second: dict[str, object]) -> bool:
    """Whether a configuration still has the values that something was made with."""
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):  # arrays, say
        return False


def chosen_packing(model: PreTrainedModel, pack_weights: bool, invariant: bool) -> bool | str:
    """How the weights of `model` are packed: as asked for, but `True` only where packed products were found faster.

    Passes that are invariant are as asked for: the bits of packed products may be others than those of plain ones, and
    no time is to choose between bits.

    Args:
        model: The model, or a clone of it.
        pack_weights: See `LookaheadConfig.pack_weights`.
        invariant: Whether passes are invariant.

    Returns:
        What `fastest_packing` gives, or `pack_weights` itself.
    """
    if not pack_weights or invariant:
        return pack_weights
    state, setting = state_of(model), (model.dtype, torch.get_num_threads())
    with state.lock:
        if setting not in state.packing:
            state.packing[setting] = fastest_packing(model)
        return state.packing[setting]


def draft_pace(
    model: PreTrainedModel, config: LookaheadConfig, rows: int, temperature: float, chains: bool = False
) -> Pace:
    """What steps of `model` cost and drafts bring: as learned in earlier calls; else costs are as `lookahead tune`
    stored them, or a first guess.

    Args:
        model: The model.
        config: How its engine is set.
        rows: Sequences that run together.
        temperature: Of sampling, 0 for greedy decoding. What drafts bring differs with it.
        chains: Whether drafts are chains.
    """
    settings = (config.pack_weights, config.engine, config.invariant, model.config._attn_implementation)
    setting = (rows, torch.get_num_threads(), model.dtype, model.device, *settings)
    key = (round(temperature, 1), chains, *setting)
    state = state_of(model)
    with state.lock:
        if setting not in state.costs:
            state.costs[setting] = _stored_costs(model, config)
        if key not in state.paces:
            state.paces[key] = Pace(state.costs[setting], rows)
        return state.paces[key]


def _stored_costs(model: PreTrainedModel, config: LookaheadConfig) -> StepCosts:
    """What `lookahead tune` measured, else a first guess."""
    return load_costs(describe_setting(model, engine_setting(config))) or StepCosts()


def draft_memory(model: PreTrainedModel, config: LookaheadConfig) -> DraftMemory:
    """The memory that a call drafts from and fills: a new one, or that of `config.memory`.

    Raises:
        InvalidArgumentError: The file is no memory, or that of another model, or there cannot be one of that name.
        OSError: The file cannot be read.
    """
    state = state_of(model)
    with state.lock:
        if config.memory == "request":
            spare, state.spare = state.spare, None
            if spare is not None:
                spare.clear()
            return DraftMemory(spare)
        if config.memory == "process":
            state.memory = state.memory or DraftMemory()
            return state.memory
        path = _path(config)
        if str(path) not in state.files:
            state.files[str(path)] = MemoryFile(path, model_identity(model))
        return state.files[str(path)].memory


def release_memory(model: PreTrainedModel, config: LookaheadConfig, memory: DraftMemory) -> None:
    """Reuse the arrays of a memory in a later call, unless another call shares them."""
    if config.memory == "request" and memory.is_used:
        state_of(model).spare = memory.ngrams


def keep_memory(model: PreTrainedModel, config: LookaheadConfig, memory: DraftMemory) -> None:
    """Bring what `memory` learned to its file, if it has one.

    A file that cannot be written is a warning: the text is there, and worth more.
    """
    if config.memory in MEMORY_SCOPES:
        return
    # Not by its path, which a change of the working directory may have changed.
    for path, file in list(state_of(model).files.items()):
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


def _path(config: LookaheadConfig) -> Path:
    path = os.fspath(config.memory)
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # there is no such user
        raise InvalidArgumentError(f"memory={path!r} cannot be written: {error}; choose another file") from error
