"""The composition of a model: everything but numbers that decides its output.

A trial shows that drafts are exact for one composition. A hook registered later, or another `forward`, module, class or
mode, makes a new composition, which needs its own trial.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
"""Hooks of all modules of the process."""

_MODEL_FILES = ("transformers.models.", "transformers_modules.")
"""Packages with functions that models call. Files of other packages may hold the caller's own variables."""

_OF_LOADING = frozenset({"init_weights", "tie_weights"})
"""Methods that transformers replaces for the time in which it loads another model."""

_CACHES = (cache_utils.Cache, cache_utils.DynamicCache, cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)

IRRELEVANT = frozenset(
    {"generate", "generation_config", "rope_deltas", "max_seq_len_cached", "_output_capturing_hooks_installed"}
)
"""Attributes of a module that no forward pass reads, or that only repeat what passes are given."""

_NUMBERS = (bool, int, float, complex, str, type(None))
_COLLECTIONS = (list, tuple, set)
_TENSOR = "a tensor"
_UNREAD = frozenset(vars(torch.nn.Module())) - {"training"}
"""Containers of every module."""

Namespace = Mapping[str, Any]
Place = tuple[int, str]
"""A module, by its place among all modules, and the name of an attribute."""


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
    """Code that modules look up outside of themselves: in their classes, the files of models, torch, caches and
    registries; and hooks of all modules of the process.

    Args:
        model: Any model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = dict.fromkeys(map(type, model.modules()))
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__[:-1])
        self._classes = [vars(base) for base in bases if base is not PreTrainedModel and not _is_of_torch(base)]
        files = dict.fromkeys(base.__module__ for base in bases if base.__module__.startswith(_MODEL_FILES))
        loaded = [vars(sys.modules[file]) for file in files if file in sys.modules]
        spaces = [*map(vars, (*bases, *_CACHES)), *loaded, vars(torch.nn.functional)]
        self._spaces = [(space, itemgetter(*names)) for space in spaces if (names := _code_names(space))]
        self._attention = model.config._attn_implementation
        self._code = self._current_code()

    def hold(self) -> bool:
        """Whether all of that is as it was."""
        try:
            return self._current_code() == self._code
        except KeyError:  # a method was deleted
            return False

    def _current_code(self) -> list[object]:
        chosen = ALL_ATTENTION_FUNCTIONS.get(self._attention), ALL_MASK_ATTENTION_FUNCTIONS.get(self._attention)
        hooks = tuple(tuple(map(id, hooks.values())) for hooks in _GLOBAL_HOOKS)
        return [chosen, hooks, list(map(len, self._classes)), *(get(space) for space, get in self._spaces)]


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _code_names(space: Namespace) -> list[str]:
    """Names of functions, methods and classes."""
    kinds = (classmethod, property)
    return [n for n, value in space.items() if n not in _OF_LOADING and (callable(value) or isinstance(value, kinds))]


class Composition:
    """The parts of a model: modules with their code, hooks, modes, numbers and configurations.

    Weights and buffers are no part of it, nor numbers that passes write. No reference to the model is held.

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
        self._configs = _configs(spaces)
        self._surroundings = Surroundings(model)
        self._written: set[Place] = set()
        self._note(spaces)
        self._is_gone = False  # a part was freed, so that another object may have its id
        parts = (
            value for space in spaces for name, value in space.items() if name not in IRRELEVANT and callable(value)
        )
        hooks = (hook for _, found in _hook_lists(spaces) for hook in found.values())
        self._guards = [self._guard(part) for part in (*modules, *parts, *hooks)]

    def holds(self, model: PreTrainedModel, after_passes: bool = False) -> bool:
        """Whether the model is still composed so. Takes about a microsecond for each module.

        Args:
            model: The model.
            after_passes: Whether passes have run since the last look. Then other numbers are theirs, and are no change
                from now on.
        """
        modules = all_modules(model)
        spaces = list(map(vars, modules))
        return (
            not self._is_gone
            and list(map(id, modules)) == self._modules
            and list(map(type, modules)) == self._kinds
            and _hooks(spaces) == self._hooks
            and _weights(spaces) == self._weights
            and _configs(spaces) == self._configs
            and self._surroundings.hold()
            and (self._looks_same(spaces) or self._has_same_attributes(spaces, after_passes))
        )

    def has_same_code_around(self) -> bool:
        """Whether the code outside of the modules is as it was: the part of `holds` that a look at modules misses."""
        return self._surroundings.hold()

    def expect_writes(self, written: Iterable[tuple[int, str]]) -> None:
        """Take attributes for such that passes write.

        Args:
            written: Each by the `id` of its module, and its name.
        """
        places = {module: place for place, module in enumerate(self._modules)}
        self._written |= {(places[module], name) for module, name in written if module in places and name != "training"}

    def _note(self, spaces: Sequence[Namespace]) -> None:
        """Remember attributes, and where they are, for a quick look."""
        tokens = list(map(_tokens, spaces))
        numbers = [
            [name for name, token in found.items() if token is space[name]]
            for found, space in zip(tokens, spaces, strict=True)
        ]
        getters = [itemgetter("training", *names) for names in numbers]
        others = [
            (place, name, token)
            for place, found in enumerate(tokens)
            for name, token in found.items()
            if name not in numbers[place]
        ]
        lengths = list(map(len, spaces))
        values = [get(space) for get, space in zip(getters, spaces, strict=True)]
        self._noted = tokens, getters, values, others, lengths  # at once, as another thread may look

    def _looks_same(self, spaces: Sequence[Namespace]) -> bool:
        """Whether all attributes are as they were. A wrong no is possible."""
        _, getters, values, others, lengths = self._noted
        try:
            return (
                list(map(len, spaces)) == lengths
                and [get(space) for get, space in zip(getters, spaces, strict=True)] == values
                and all(_token(spaces[place].get(name)) == token for place, name, token in others)
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # one was deleted, or is a tensor now
            return False

    def _has_same_attributes(self, spaces: Sequence[Namespace], after_passes: bool) -> bool:
        now = list(map(_tokens, spaces))
        before = self._noted[0]
        changed = {
            (place, name)
            for place, (new, old) in enumerate(zip(now, before, strict=True))
            if new != old
            for name in new.keys() | old.keys()
            if new.get(name) != old.get(name)
        } - self._written
        tokens = [found[place].get(name) for place, name in changed for found in (now, before)]
        if changed and not (after_passes and all(map(_is_number, tokens))):
            return False
        self._written |= changed
        self._note(spaces)
        return True

    def _guard(self, part: Any) -> object:
        """Something that notices when a part is freed; the part itself, where it cannot be referred to weakly."""
        try:
            return weakref.ref(part, self._note_end)
        except TypeError:
            return part

    def _note_end(self, _: object) -> None:
        self._is_gone = True


def _tokens(space: Namespace) -> dict[str, object]:
    """Attributes of a module that may decide its output, each as something that can be compared."""
    names = [name for name in space if name not in _UNREAD and name not in IRRELEVANT]
    found = {name: _token(space[name]) for name in names}
    return {name: token for name, token in found.items() if token is not _UNKNOWN}


_UNKNOWN = object()


def _token(value: object) -> object:
    """Numbers and names as they are, collections of them as text, callables by identity, and that there is a tensor."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, _COLLECTIONS):
        return repr(value) if all(isinstance(item, _NUMBERS) for item in value) else _UNKNOWN
    return ("callable", id(value)) if callable(value) else _UNKNOWN


def _is_number(token: object) -> bool:
    """Whether passes may write this: a number, nothing, or a tensor."""
    return token is None or token is _TENSOR or (isinstance(token, int | float | complex) and type(token) is not bool)


def _hook_lists(spaces: Sequence[Namespace]) -> list[tuple[int, Mapping[int, Any]]]:
    """Hooks that there are, each list with the place of its module; -1 for the whole process."""
    after = [(place, hooks) for place, space in enumerate(spaces) if (hooks := space.get("_forward_hooks"))]
    before = [(place, hooks) for place, space in enumerate(spaces) if (hooks := space.get("_forward_pre_hooks"))]
    return [*after, *before, *((-1, hooks) for hooks in _GLOBAL_HOOKS if hooks)]


def _hooks(spaces: Sequence[Namespace]) -> list[object]:
    """Hooks of each module that has some. Hooks that collect outputs for transformers are left out: passes add them."""
    found: list[object] = []
    for place, hooks in _hook_lists(spaces):
        space = spaces[place] if place >= 0 else {}
        named = {**space.get("_forward_hooks_with_kwargs", {}), **space.get("_forward_pre_hooks_with_kwargs", {})}
        kept = [(id(hook), key in named) for key, hook in hooks.items() if not collects_outputs(hook)]
        found += [(place, kept)] if kept else []
    return found


def collects_outputs(hook: Any) -> bool:
    """Whether transformers registered a hook, in the first pass that was to return what it collects."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _weights(spaces: Sequence[Namespace]) -> list[tuple[object, ...]]:
    """The kinds of all weights: quantised ones are multiplied otherwise."""
    weights = [weight for space in spaces for weight in space["_parameters"].values() if weight is not None]
    return [(type(weight), weight.dtype, weight.device) for weight in weights]


def _configs(spaces: Sequence[Namespace]) -> list[tuple[int, dict[str, object]]]:
    """The configurations of modules and those inside of them, each once, with their values."""
    found = {id(config): config for space in spaces if (config := space.get("config")) is not None}
    left = [config for config in found.values() if hasattr(config, "__dict__")]
    values: dict[int, dict[str, object]] = {}
    while left:
        config = left.pop()
        if id(config) not in values:
            values[id(config)] = {name: _setting(value) for name, value in vars(config).items()}
            left += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(values.items())


def _setting(value: object) -> object:
    if isinstance(value, _NUMBERS):
        return value
    return repr(value) if isinstance(value, list | tuple | set | dict) else id(value)
