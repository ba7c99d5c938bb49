"""Code around a model's modules that determines its output: classes, files of models, torch and registries."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel, cache_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.backends.transformers.memory_words import DictVersions, dictionary_of, has_dict_versions

GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
"""Global hooks, for all modules of the process."""

_MODEL_FILES = ("transformers.models.", "transformers_modules.")
"""Packages of model code. Modules of other packages may contain variables of the caller."""

_OF_COMPILING = frozenset({"__init__", "__setstate__"})
"""Methods of torch's `Module` that torch replaces when it first compiles; passes do not call them."""

_OF_LOADING = frozenset({"init_weights", "tie_weights"})
"""Methods that transformers replaces while it loads another model."""

_CACHES = (cache_utils.Cache, cache_utils.DynamicCache, cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)

Namespace = Mapping[str, Any]


class Surroundings:
    """Code outside of a model's modules: classes, files of models, torch, caches and registries; and global hooks.

    Args:
        model: Any model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = dict.fromkeys(map(type, model.modules()))
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__[:-1])
        written = [base for base in bases if base is not PreTrainedModel and not _is_of_torch(base)]
        self._classes = [*map(vars, (*written, *_CACHES))]
        files = dict.fromkeys(base.__module__ for base in bases if base.__module__.startswith(_MODEL_FILES))
        loaded = [vars(sys.modules[file]) for file in files if file in sys.modules]
        spaces = [*map(vars, (*bases, *_CACHES)), *loaded, vars(torch.nn.functional)]
        named = [(space, names) for space in spaces if (names := _code_names(space))]
        self._spaces = [(space, itemgetter(*names)) for space, names in named]
        found = (one for space, names in named for name in names for one in _functions(space[name]))
        self._functions = [one for one in found if not str(one.__module__).startswith("torch.")]
        self._attention = model.config._attn_implementation
        self._versions: DictVersions | None = None
        self._registered = self._currently_registered()
        self._code = self._current_code()

    def hold(self) -> bool:
        """Return whether the code is unchanged, in microseconds if little was written since the last call."""
        if self._currently_registered() != self._registered:
            return False
        if not has_dict_versions():
            return self._has_same_code()
        versions = self._versions
        if versions is None:
            dictionaries = [*map(dictionary_of, (*self._classes, *[space for space, _ in self._spaces]))]
            versions = DictVersions(dictionaries, (), self._functions)
        elif versions.hold():
            return True
        words = versions.read()  # before the comparison, as other threads may write meanwhile
        if not self._has_same_code():
            return False
        versions.note(words)
        self._versions = versions
        return True

    def _has_same_code(self) -> bool:
        try:
            return self._current_code() == self._code
        except KeyError:  # a method was deleted
            return False

    def _currently_registered(self) -> list[object]:
        """Return the functions of attention and the global hooks."""
        chosen = ALL_ATTENTION_FUNCTIONS.get(self._attention), ALL_MASK_ATTENTION_FUNCTIONS.get(self._attention)
        return [chosen, *map(identity, chosen), *[tuple(map(identity, hooks.values())) for hooks in GLOBAL_HOOKS]]

    def _current_code(self) -> list[object]:
        sizes = [len(space.keys() - _CACHED_BY_PYTHON) for space in self._classes]
        functions = self._functions
        return [sizes, *[get(space) for space, get in self._spaces], *map(_BODY, functions), *map(_DEFAULTS, functions)]


_NAMES_OF_CLASSES = frozenset({"__doc__", "__module__", "__qualname__"})

_CACHED_BY_PYTHON = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__"})
"""Attributes that Python adds to a class when an object of it is first copied, or its annotations are first read."""


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


_BODY, _DEFAULTS = attrgetter("__code__"), attrgetter("__defaults__")
"""Parts that can be replaced inside a function, as IPython's autoreload does."""


def identity(function: Any) -> tuple[object, ...]:
    """Return comparable values of a function or another callable, without a reference to it or to its defaults."""
    return id(function), getattr(function, "__code__", None), id(getattr(function, "__defaults__", None))


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the Python function of a function, method or property, and the functions that it wraps."""
    value = getattr(value, "fget", value)
    value = getattr(value, "__func__", value)
    while isinstance(value, FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def _code_names(space: Namespace) -> list[str]:
    """Return the names of functions, methods and classes, and of switches of a class."""
    kinds: tuple[type, ...] = (classmethod, property)
    unread = _OF_LOADING | _NAMES_OF_CLASSES
    if space.get("__module__") == torch.nn.Module.__module__:
        unread |= _OF_COMPILING
    if "__module__" in space:
        kinds += (bool, str)
    return [n for n, value in space.items() if n not in unread and (callable(value) or isinstance(value, kinds))]
