"""State that the library keeps for a model between calls, in one object with the lifetime of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.composition import Composition, are_same, copied
from lookahead.backends.transformers.packed_linear import fastest_packing

if TYPE_CHECKING:
    from lookahead.core.pace import Pace
    from lookahead.core.step_costs import StepCosts
    from lookahead.drafting import DraftMemory
    from lookahead.drafting.memory_file import MemoryFile

T = TypeVar("T")

Setting = tuple[object, ...]
"""Key of a result: attention, number type, device and others at the time of its trial."""

_RECENT = 4
"""Number of earlier compositions with cached trials, for hooks that are registered and removed repeatedly."""


@dataclass(eq=False)
class Trials:
    """Results for one composition of a model.

    Attributes:
        composition: The composition; `None` for our own clones, which change only with the caller's model.
        made: Results of `once` by their keys.
        clones: Clones (`SharedClone`) by their settings, or the reason of a failed trial.
        fixed_passes: `FixedPasses` released by the last call, for the next one.
        of_config: Results of `of_config`, each with the values of its configuration.
    """

    composition: Composition | None = None
    made: dict[Setting, Any] = field(default_factory=dict)
    clones: dict[Setting, Any] = field(default_factory=dict)
    fixed_passes: Any = None
    of_config: dict[Setting, tuple[dict[str, object], Any]] = field(default_factory=dict)

    def holds(self, model: PreTrainedModel) -> bool:
        """Return whether the model still has this composition."""
        return self.composition is None or self.composition.holds(model)


@dataclass(eq=False)
class ModelState:
    """State of one model, outside of the model, so that copies and pickles do not include it.

    It never refers to the model, which could not be freed otherwise. A shared-weight clone has its own state.

    Attributes:
        lock: Lock for a lookup and the creation of a missing result.
        trials: Results for the current composition.
        recent: Results for earlier compositions.
        costs: Costs of steps by setting.
        paces: Paces by setting and temperature.
        memories: n-gram memories of `memory="process"` by the active adapters and the tenant, the last used one last.
        spares: n-gram memories of ended texts, for reuse of their arrays.
        files: Open memory files by path.
        passes_write: Whether a pass has written values into modules.
    """

    lock: RLock = field(default_factory=RLock)
    trials: Trials = field(default_factory=Trials)
    recent: list[Trials] = field(default_factory=list)
    costs: dict[Setting, StepCosts] = field(default_factory=dict)
    paces: dict[Setting, Pace] = field(default_factory=dict)
    memories: dict[object, DraftMemory] = field(default_factory=dict)
    spares: list[DraftMemory] = field(default_factory=list)
    files: dict[str, MemoryFile] = field(default_factory=dict)
    passes_write: bool = False

    def forget(self) -> None:
        """Drop all trials and timings, but keep n-gram memories."""
        with self.lock:
            self.trials = Trials()
            self.recent.clear()
            self.costs.clear()
            self.paces.clear()

    def _archive(self) -> None:
        """Move the current trials to `recent`, without fixed passes and packed weights, which are large."""
        self.trials.fixed_passes = None
        self.trials.clones = {setting: clone for setting, clone in self.trials.clones.items() if not setting[-1]}
        self.recent = [self.trials, *self.recent][:_RECENT]


def follow(model: PreTrainedModel) -> Composition:
    """Switch to the trials of the model's current composition. Every call does so before it runs the model.

    Returns:
        The composition, to detect changes during the call.
    """
    state = state_of(model)
    with state.lock:
        composition = state.trials.composition
        if composition is not None and composition.holds(model):
            return composition
        if composition is not None:
            state._archive()
        known = next((trials for trials in state.recent if trials.holds(model)), None)
        if known is not None:
            state.recent.remove(known)
        state.trials = known or Trials(Composition(model))
        assert state.trials.composition is not None
        return state.trials.composition


def once(model: PreTrainedModel, key: Setting, make: Callable[[], T]) -> T:
    """Return the result of `make`, cached by `key` for the current composition of the model.

    Errors are not cached, and neither are results of a trial that the model changed in.
    """
    state = state_of(model)
    with state.lock:
        trials = state.trials
        if key in trials.made:
            made: T = trials.made[key]
            return made
        made = make()
        if trials.holds(model):
            trials.made[key] = made
        return made


def model_setting(model: PreTrainedModel) -> Setting:
    """Return the modes of a model that select other kernels or masks."""
    device = model.device
    is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    autocast = torch.get_autocast_dtype(device.type) if is_cast else None
    return (model.config._attn_implementation, model.dtype, device, autocast)


STATES: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()
"""States of all models; the only registry of models."""


def state_of(model: PreTrainedModel) -> ModelState:
    """Return the state of `model`; an empty one on first use."""
    return STATES.get(model) or STATES.setdefault(model, ModelState())


def of_config(model: PreTrainedModel, key: Setting, make: Callable[[], T]) -> T:
    """Return the result of `make`, cached by `key` for the current values of the model's configuration."""
    results = state_of(model).trials.of_config
    values = vars(model.config)
    if key not in results or not are_same(results[key][0], values):
        results[key] = (copied(values), make())
    made: T = results[key][1]
    return made


def chosen_packing(model: PreTrainedModel, pack_weights: bool, invariant: bool) -> int:
    """Return the smallest number of rows for products of packed weights, where these are faster; 0 for none.

    Invariant passes always use them if requested: packed and plain products may have different bits, and a time must
    not choose between bits.
    """
    if not pack_weights or invariant:
        return int(pack_weights)
    setting = ("packing", model.dtype, torch.get_num_threads())
    return once(model, setting, lambda: fastest_packing(model))


_parameters: WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = WeakKeyDictionary()
"""Parameters by function: a lookup takes as long as a small layer."""


def forward_arguments(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `model.forward` by name."""
    function = getattr(model.forward, "__func__", None)
    if function is None:  # not a method; it may refer to the model, so it is not cached
        return inspect.signature(model.forward).parameters
    if function not in _parameters:
        _parameters[function] = inspect.signature(function).parameters
    return _parameters[function]
