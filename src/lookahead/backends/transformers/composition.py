"""The composition of a model: everything but numbers that decides its output.

A trial shows that drafts are exact for one composition. A hook registered later, or another `forward`, module, class or
mode, makes a new composition, which needs its own trial.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
"""Hooks of all modules of the process."""

_LIBRARIES = ("torch", "transformers")
"""Packages with functions that models call. Files of other packages may hold the caller's own variables."""

IRRELEVANT = frozenset({"generate", "generation_config", "rope_deltas", "_output_capturing_hooks_installed"})
"""Attributes of a model that no forward pass reads, or none that is handed positions."""

_FLAGS = (bool, str, type(None))

Namespace = Mapping[str, Any]


def all_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """`model` and all modules in it, each once; in a third of the time that `model.modules()` takes."""
    found: list[torch.nn.Module] = [model]
    seen = {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


class Surroundings:
    """Code that modules look up outside of themselves: in their classes, the files of these, torch and registries; and
    hooks of all modules of the process.

    Args:
        model: Any model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = dict.fromkeys(map(type, model.modules()))
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__[:-1])
        files = dict.fromkeys(base.__module__ for base in bases if base.__module__.startswith(_LIBRARIES))
        loaded = [sys.modules[file] for file in files if file in sys.modules]
        self._spaces = [*map(vars, bases), *map(vars, loaded), vars(torch.nn.functional)]
        self._attention = model.config._attn_implementation
        self._code = self._current_code()

    def hold(self) -> bool:
        """Whether all of that is as it was."""
        return self._current_code() == self._code

    def _current_code(self) -> list[tuple[Any, ...]]:
        chosen = ALL_ATTENTION_FUNCTIONS.get(self._attention), ALL_MASK_ATTENTION_FUNCTIONS.get(self._attention)
        hooks = tuple(tuple(map(id, hooks.values())) for hooks in _GLOBAL_HOOKS)
        return [chosen, hooks, *(tuple(space.values()) for space in self._spaces)]


class Composition:
    """The parts of a model: modules with their code, hooks, modes and configurations.

    Numbers and tensors are no part of it, as passes change them: weights, buffers, lengths seen so far.
    No reference to the model is held.

    Args:
        model: The model as it is now.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = all_modules(model)
        spaces = list(map(vars, modules))
        self._modules = list(map(id, modules))
        self._kinds = list(map(type, modules))
        self._hooks = _hooks(spaces)
        self._weights = _weights(spaces)
        self._configs = [(id(config), copy.deepcopy(vars(config))) for config in _configs(spaces)]
        self._surroundings = Surroundings(model)
        self._code = list(map(_code, spaces))
        self._note(spaces)
        self._is_gone = False  # a part was freed, so that another object may have its id
        parts = (value for space in spaces for value in space.values() if callable(value))
        hooks = (hook for found in _hook_lists(spaces) for hook in found.values())
        self._guards = [self._guard(part) for part in (*modules, *parts, *hooks)]

    def holds(self, model: PreTrainedModel) -> bool:
        """Whether the model is still composed so. Takes about a microsecond for each module."""
        modules = all_modules(model)
        spaces = list(map(vars, modules))
        try:
            return (
                not self._is_gone
                and list(map(id, modules)) == self._modules
                and list(map(type, modules)) == self._kinds
                and _hooks(spaces) == self._hooks
                and _weights(spaces) == self._weights
                and [(id(config), vars(config)) for config in _configs(spaces)] == self._configs
                and self._surroundings.hold()
                and self._have_same_code(spaces)
            )
        except (KeyError, TypeError, ValueError, RuntimeError):  # arrays in a configuration, or a change meanwhile
            return False

    def has_same_code_around(self) -> bool:
        """Whether the code outside of the modules is as it was: the part of `holds` that a look at modules misses."""
        return self._surroundings.hold()

    def _note(self, spaces: Sequence[Namespace]) -> None:
        """Remember where flags and callables of modules are, for a quick look."""
        flags = [[name for name, value in space.items() if isinstance(value, _FLAGS)] for space in spaces]
        self._getters = [itemgetter("training", *names) for names in flags]
        self._flags = self._current_flags(spaces)
        self._callables = [
            (place, name) for place, space in enumerate(spaces) for name, value in space.items() if callable(value)
        ]
        self._called = self._current_callables(spaces)
        self._lengths = list(map(len, spaces))

    def _have_same_code(self, spaces: Sequence[Namespace]) -> bool:
        if (
            list(map(len, spaces)) == self._lengths
            and self._current_flags(spaces) == self._flags
            and self._current_callables(spaces) == self._called
        ):
            return True
        if list(map(_code, spaces)) != self._code:
            return False
        self._note(spaces)  # nothing but an attribute without code came, went or changed
        return True

    def _current_flags(self, spaces: Sequence[Namespace]) -> list[object]:
        return [get(space) for get, space in zip(self._getters, spaces, strict=True)]

    def _current_callables(self, spaces: Sequence[Namespace]) -> list[int]:
        return [id(spaces[place].get(name)) for place, name in self._callables]

    def _guard(self, part: Any) -> object:
        """Something that notices when a part is freed; the part itself, where it cannot be referred to weakly."""
        try:
            return weakref.ref(part, self._note_end)
        except TypeError:
            return part

    def _note_end(self, _: object) -> None:
        self._is_gone = True


def _code(space: Namespace) -> dict[str, object]:
    """Attributes of a module that are code or a mode: callables by identity, flags and names by value."""
    found: dict[str, object] = {}
    for name, value in space.items():
        if name in IRRELEVANT or value is None:
            continue
        if isinstance(value, _FLAGS) or _lists_flags(value):
            found[name] = copy.copy(value)
        elif callable(value):
            found[name] = id(value)
    return found


def _lists_flags(value: object) -> bool:
    """Whether this is a collection of names or flags, for example the active adapters of a layer."""
    return isinstance(value, list | tuple | set) and all(isinstance(item, _FLAGS) for item in value)


def _hook_lists(spaces: Sequence[Namespace]) -> list[Mapping[int, Any]]:
    """Those that are not empty."""
    after = [hooks for space in spaces if (hooks := space.get("_forward_hooks"))]
    before = [hooks for space in spaces if (hooks := space.get("_forward_pre_hooks"))]
    return [*after, *before, *filter(None, _GLOBAL_HOOKS)]


def _hooks(spaces: Sequence[Namespace]) -> list[list[int]]:
    """Hooks of each module that has some. Hooks that collect outputs for transformers are left out: passes add them."""
    found = ([id(hook) for hook in hooks.values() if not _collects(hook)] for hooks in _hook_lists(spaces))
    return [hooks for hooks in found if hooks]


def _collects(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _weights(spaces: Sequence[Namespace]) -> list[tuple[object, ...]]:
    """The kinds of all weights: quantised ones are multiplied otherwise."""
    weights = [weight for space in spaces for weight in space["_parameters"].values() if weight is not None]
    return [(type(weight), weight.dtype, weight.device) for weight in weights]


def _configs(spaces: Sequence[Namespace]) -> list[Any]:
    """The configurations of modules, each once."""
    found = {id(config): config for space in spaces if (config := space.get("config")) is not None}
    return [config for config in found.values() if hasattr(config, "__dict__")]
