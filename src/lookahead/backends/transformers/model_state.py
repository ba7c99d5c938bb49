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

from lookahead.backends.transformers.packed_linear import fastest_packing

if TYPE_CHECKING:
    from lookahead.backends.transformers.fixed_passes import StaticSteps
    from lookahead.backends.transformers.shared_clone import SharedClone
    from lookahead.core.pace import Pace
    from lookahead.core.step_costs import StepCosts
    from lookahead.drafting import DraftMemory
    from lookahead.drafting.memory_file import MemoryFile

T = TypeVar("T")

Setting = tuple[object, ...]
"""How a model was set when something was made or tried for it: its attention, number type, device, ..."""


@dataclass(eq=False)
class ModelState:
    """All that the library keeps for one model. It lies outside of the model, so a copy or a pickle begins without.

    Nothing in here refers to the model, or it would never go. A shared-weight clone is a model of its own, with a state
    of its own.

    Attributes:
        lock: Held by a thread while it looks for something in here and makes it where it is missing.
        made: What `once` made or tried, by what it is and how the model was set.
        clones: Shared-weight clones: what each was made of (`structure`), and the clone; in its place why there is
            none, where it did not do what it should.
        static_steps: Those that its last call released: what was captured serves the next call as well.
        costs: What its steps cost, by setting.
        paces: What its drafts gain, by setting and temperature.
        memory: The n-gram memory of `memory="process"`.
        spares: n-gram memories of texts that have ended, for the next ones to begin anew.
        files: Open memory files, by path.
        of_config: What was made of its configuration, by what it is, and the values that it had; see `of_config`.
    """

    lock: RLock = field(default_factory=RLock)
    made: dict[Setting, Any] = field(default_factory=dict)
    clones: dict[Setting, tuple[list[object], SharedClone | str]] = field(default_factory=dict)
    static_steps: StaticSteps | None = None
    costs: dict[Setting, StepCosts] = field(default_factory=dict)
    paces: dict[Setting, Pace] = field(default_factory=dict)
    memory: DraftMemory | None = None
    spares: list[DraftMemory] = field(default_factory=list)
    files: dict[str, MemoryFile] = field(default_factory=dict)
    of_config: dict[Setting, tuple[dict[str, object], Any]] = field(default_factory=dict)

    def once(self, what: Setting, make: Callable[[], T]) -> T:
        """What `make` gave when it was first called for `what`; what it raises is not kept."""
        with self.lock:
            if what not in self.made:
                self.made[what] = make()
            made: T = self.made[what]
            return made


def model_setting(model: PreTrainedModel) -> Setting:
    """How a model is set. Another attention implementation is another way to read a mask."""
    return (model.config._attn_implementation, model.dtype, model.device)


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()


def state_of(model: PreTrainedModel) -> ModelState:
    """What is kept for `model`; an empty state on first use."""
    return _states.get(model) or _states.setdefault(model, ModelState())


def of_config(model: PreTrainedModel, what: Setting, make: Callable[[], T]) -> T:
    """What `make` makes of the configuration of `model`, or made when it had the same values: writing it out takes far
    longer than comparing two. By `what` it is told from other things that are made of configurations."""
    kept, values = state_of(model).of_config, vars(model.config)
    if what not in kept or not _are_same(kept[what][0], values):
        kept[what] = (copy.deepcopy(values), make())
    made: T = kept[what][1]
    return made


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
    return state_of(model).once(setting, lambda: fastest_packing(model))


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
