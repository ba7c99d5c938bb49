"""Everything that is kept for a model between calls, in one object that goes when the model goes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.composition import Composition
from lookahead.backends.transformers.packed_linear import fastest_packing

if TYPE_CHECKING:
    from lookahead.core.pace import Pace
    from lookahead.core.step_costs import StepCosts
    from lookahead.drafting import DraftMemory
    from lookahead.drafting.memory_file import MemoryFile

T = TypeVar("T")

Setting = tuple[object, ...]
"""How a model was set when something was made or tried for it: its attention, number type, device, ..."""

_RECENT = 4
"""Compositions of a model whose trials are kept: a hook that comes and goes is not tried each time."""


@dataclass(eq=False)
class Trials:
    """All that was tried and made of a model while it had one composition.

    Attributes:
        composition: That composition; `None` for modules of ours, which only change with the caller's model.
        made: Results of `once`, by what was asked and how the model was set.
        clones: Clones (`SharedClone`) by their settings; in place of one that failed its trial, the reason.
        static_steps: The `StaticSteps` that the last call released: what was captured serves the next call as well.
        of_config: Results of `of_config`, each with the values of the configuration that it was made of.
    """

    composition: Composition | None = None
    made: dict[Setting, Any] = field(default_factory=dict)
    clones: dict[Setting, Any] = field(default_factory=dict)
    static_steps: Any = None
    of_config: dict[Setting, tuple[dict[str, object], Any]] = field(default_factory=dict)

    def holds(self, model: PreTrainedModel) -> bool:
        """Whether these are about the model as it is now."""
        return self.composition is None or self.composition.holds(model)


@dataclass(eq=False)
class ModelState:
    """All that the library keeps for one model. It lies outside of the model, so a copy or a pickle begins without.

    Nothing in here refers to the model, or it would never go. A shared-weight clone is a model of its own, with a state
    of its own.

    Attributes:
        lock: Held by a thread while it looks for something in here and makes it where it is missing.
        trials: What was tried and made of the model as it is composed now.
        recent: The same of compositions that it had before.
        costs: What its steps cost, by setting.
        paces: What its drafts gain, by setting and temperature.
        memory: The n-gram memory of `memory="process"`.
        spares: n-gram memories of texts that have ended, for the next ones to begin anew.
        files: Open memory files, by path.
        passes_write: Whether passes were seen to write values into modules.
    """

    lock: RLock = field(default_factory=RLock)
    trials: Trials = field(default_factory=Trials)
    recent: list[Trials] = field(default_factory=list)
    costs: dict[Setting, StepCosts] = field(default_factory=dict)
    paces: dict[Setting, Pace] = field(default_factory=dict)
    memory: DraftMemory | None = None
    spares: list[DraftMemory] = field(default_factory=list)
    files: dict[str, MemoryFile] = field(default_factory=dict)
    passes_write: bool = False

    def forget(self) -> None:
        """Drop all trials and timings, and keep the texts that were learned."""
        with self.lock:
            self.trials = Trials()
            self.recent.clear()
            self.costs.clear()
            self.paces.clear()

    def _leave(self) -> None:
        """Keep what was tried of the composition until now, without what takes much memory."""
        self.trials.static_steps = None
        self.trials.clones = {setting: clone for setting, clone in self.trials.clones.items() if not setting[-1]}
        self.recent = [self.trials, *self.recent][:_RECENT]


def follow(model: PreTrainedModel) -> Composition:
    """Take the model as it is composed now: what was tried of another composition is not trusted.

    Every call does so once before it runs the model.

    Returns:
        The composition, by which a call sees at its end whether the model has changed meanwhile.
    """
    state = state_of(model)
    with state.lock:
        composition = state.trials.composition
        if composition is not None and composition.holds(model):
            return composition
        if composition is not None:
            state._leave()
        known = next((trials for trials in state.recent if trials.holds(model)), None)
        if known is not None:
            state.recent.remove(known)
        state.trials = known or Trials(Composition(model))
        assert state.trials.composition is not None
        return state.trials.composition


def once(model: PreTrainedModel, what: Setting, make: Callable[[], T]) -> T:
    """The result of the first call of `make` for `what`, while the model is composed as it is.

    Errors are not kept, nor the result of a trial during which the model changed.
    """
    state = state_of(model)
    with state.lock:
        trials = state.trials
        if what in trials.made:
            made: T = trials.made[what]
            return made
        made = make()
        if trials.holds(model):
            trials.made[what] = made
        return made


def model_setting(model: PreTrainedModel) -> Setting:
    """Modes that a model is run in: each has other kernels, or another way to read a mask."""
    device = model.device
    is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    autocast = torch.get_autocast_dtype(device.type) if is_cast else None
    return (model.config._attn_implementation, model.dtype, device, autocast)


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()


def state_of(model: PreTrainedModel) -> ModelState:
    """What is kept for `model`; an empty state on first use."""
    return _states.get(model) or _states.setdefault(model, ModelState())


def of_config(model: PreTrainedModel, what: Setting, make: Callable[[], T]) -> T:
    """What `make` makes of the configuration of `model`, or made when it had the same values: writing it out takes far
    longer than comparing two. By `what` it is told from other things that are made of configurations."""
    kept = state_of(model).trials.of_config
    values = vars(model.config)
    if what not in kept or not _are_same(kept[what][0], values):
        kept[what] = (_copied(values), make())
    made: T = kept[what][1]
    return made


def _copied(values: dict[str, object]) -> dict[str, object]:
    try:
        return copy.deepcopy(values)
    except Exception:  # a lock, for example; changes inside of values go unnoticed then
        return dict(values)


def _are_same(first: dict[str, object], second: dict[str, object]) -> bool:
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):  # arrays, say
        return False


def chosen_packing(model: PreTrainedModel, pack_weights: bool, invariant: bool) -> int:
    """From how many rows on products of `model` are of packed weights, if that is asked for: where they were found
    faster.

    Passes that are invariant have no others then: the bits of packed products may be others than those of plain
    ones, and no time is to choose between bits.

    Returns:
        What `fastest_packing` gives; 0 for none.
    """
    if not pack_weights or invariant:
        return int(pack_weights)
    setting = ("packing", model.dtype, torch.get_num_threads())
    return once(model, setting, lambda: fastest_packing(model))


_parameters: WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = WeakKeyDictionary()
"""By function, as looking takes as long as a small layer, and every call asks several times."""


def forward_arguments(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """The parameters of `model.forward`, by name."""
    function = getattr(model.forward, "__func__", None)
    if function is None:  # something else than a method was put there, which may refer to the model
        return inspect.signature(model.forward).parameters
    if function not in _parameters:
        _parameters[function] = inspect.signature(function).parameters
    return _parameters[function]
