"""A watch for changes of a model between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_int32
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.transformers.composition import (
    IRRELEVANT,
    OF_SAVING,
    Composition,
    all_modules,
    collects_outputs,
    containers_of,
)
from lookahead.backends.transformers.memory_words import DictVersions, Words, has_dict_versions, reads_words
from lookahead.backends.transformers.model_state import ModelState
from lookahead.backends.transformers.snapshots import fingerprint, in_threads

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_READ = {"training", "_parameters", "_buffers", "_modules", *_HOOKS}

_UNREAD = frozenset(vars(torch.nn.Module())) - _READ
"""Attributes of every module that forward passes without gradients do not read directly."""

_SETTLED = 8
"""Number of first passes that are checked for values that they write."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_version = attrgetter("_version")
_place = torch.Tensor.data_ptr


class ModelWatch:
    """Watch that detects changes of a model in microseconds.

    It detects a changed `Composition`, attribute, module, hook, parameter, buffer or configuration, and writes to
    weights. Torch counts most writes. Of uncounted ones (through `.data` or numpy) a quick check detects a change of
    the middle word of a CPU tensor, and a thorough check a change of any bit of a CPU parameter or buffer.

    Args:
        model: The model.
        engine: Module that runs the passes: the model, or a clone.
        compares_bits: Whether thorough checks are possible. They need a fingerprint of all weights.
        composition: Current composition of the model.
        state: State of the model.
        is_recorded: Whether passes are recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: PreTrainedModel,
        compares_bits: bool,
        composition: Composition,
        state: ModelState,
        is_recorded: bool,
    ) -> None:
        self._model = model
        self._composition = composition
        self._state = state
        self._is_recorded = is_recorded
        self._settled = 0  # number of passes without writes
        self._runs = {id(module) for module in all_modules(engine)}
        self._note()
        self._bits = self._current_bits() if compares_bits else None

    def has_changed(self, thorough: bool, compares_places: bool = True) -> bool:
        """Return whether the model has changed.

        Args:
            thorough: Whether to compare the whole composition, and all bits of the weights, which takes about as long
                as a plain step.
            compares_places: Whether to compare the addresses of weights.
        """
        if not (self._composition.has_same_code_around() and self._whole.holds(compares_places)):
            # A pass may have written the other values: check after later ones.
            self._state.passes_write |= self._whole.weights_hold() and self._composition.holds(self._model)
            return True
        if thorough and not self._composition.holds(self._model):
            return True
        if not thorough or self._bits is None:
            return False
        return not all(map(np.array_equal, self._current_bits(), self._bits))

    def changed_before_pass(self) -> bool:
        """Return whether a change of the model forbids the launch of a pass.

        Passes of most models write no values into modules. After the first passes have shown this, a check after the
        launch is enough, while the device computes. But a recorded pass must never read weights from freed memory.
        """
        if self._is_quiet:
            return self._is_recorded and not self._whole.weights_are_in_place()
        return self.has_changed(thorough=False)

    def changed_by_pass(self) -> bool:
        """Return whether the model has changed, just after the launch of a pass.

        Values that the pass wrote into modules are accepted. Passes never write code and weights. The first write of a
        later pass counts as a change.
        """
        if self._is_quiet:
            return self.has_changed(thorough=False, compares_places=not self._is_recorded)
        self._settled += 1
        if self._shared.holds() or not self._whole.weights_hold():
            return False
        if self._composition.holds(self._model, after_passes=True):
            self._state.passes_write = True
            self._note()
        return False

    @property
    def _is_quiet(self) -> bool:
        """Whether passes write no values into modules."""
        return self._settled >= _SETTLED and not self._state.passes_write

    def _current_bits(self) -> list[NDArray[np.uint64]]:
        """Return the fingerprints of the parameters, and of the buffers unless passes write these."""
        return _fingerprints([*self._model.parameters(), *(() if self._state.passes_write else self._model.buffers())])

    def _note(self) -> None:
        modules = all_modules(self._model)
        self._whole = _Snapshot(modules)
        self._shared = _Snapshot([module for module in modules if id(module) in self._runs])


class _Snapshot:
    """Snapshot of modules, with their configurations and the memory of their tensors."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._structure = _Structure(modules)
        self._configs = list({id(config): config for module in modules if (config := _config(module))}.values())
        self._settings = [
            {name: copy.deepcopy(value) if isinstance(value, (dict, list)) else value for name, value in fields.items()}
            for fields in map(vars, self._configs)
        ]
        self._weights = _Memory(weight for module in modules for weight in module._parameters.values())
        self._others = _Memory(
            value for module in modules for value in (*module._buffers.values(), *vars(module).values())
        )

    def holds(self, compares_places: bool = True) -> bool:
        """Return whether the modules are unchanged; see `ModelWatch.has_changed`."""
        try:
            return (
                self._structure.holds()
                and self._settings_hold()
                and self._weights.holds(compares_places)
                and self._others.holds()
            )
        except (KeyError, TypeError, ValueError, RuntimeError):  # a deleted attribute, or a replaced tensor
            return False

    def _settings_hold(self) -> bool:
        spaces = list(map(vars, self._configs))
        return spaces == self._settings or list(map(_read_settings, spaces)) == list(
            map(_read_settings, self._settings)
        )

    def weights_hold(self) -> bool:
        """Return whether the weights are unwritten."""
        return self._weights.holds()

    def weights_are_in_place(self) -> bool:
        """Return whether the weights have the same addresses."""
        return self._weights.is_in_place()


class _Structure:
    """Classes, attributes, hooks, parameters and submodules of modules."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        attributes = (value for module in modules for name, value in vars(module).items() if name not in _UNREAD)
        containers = list({id(one): one for value in attributes for one in containers_of(value)}.values())
        dictionaries = [container for container in containers if isinstance(container, dict)]
        self._versions = DictVersions([*map(vars, modules), *dictionaries], modules) if has_dict_versions() else None
        # Lists have no versions, and an `OrderedDict` keeps its version when its order changes.
        self._unversioned: list[Any] = [
            one for one in containers if not isinstance(one, dict) or (one and type(one) is not dict)
        ]
        self._unversioned_contents: list[Any] = list(map(copy.copy, self._unversioned))
        self._kinds = list(map(type, modules))
        self._models = [module for module in modules if isinstance(module, PreTrainedModel)]
        spaces = [vars(module) for module in modules if not isinstance(module, PreTrainedModel)]
        self._spaces = [(space, itemgetter(*[name for name in space if name not in _UNREAD])) for space in spaces]
        self._attributes = self._current_attributes()
        hooks = {
            id(one): one for space in map(vars, modules) for name in _HOOKS if (one := space.get(name)) is not None
        }
        self._hooks = list(hooks.values())
        self._own_hooks = _own_hooks(self._hooks)
        self._containers: list[Any] = [container for container in containers if id(container) not in hooks]
        self._contents: list[Any] = list(map(copy.copy, self._containers))

    def holds(self) -> bool:
        """Return whether all is unchanged.

        Raises:
            Exception: An attribute was deleted, or replaced by a value that cannot be compared.
        """
        if self._versions is None:
            return self._equals()
        if self._versions.hold() and self._unversioned == self._unversioned_contents:
            return True
        words = self._versions.read()  # before the comparison, as other threads may write meanwhile
        unversioned = list(map(copy.copy, self._unversioned))
        if not self._equals():
            return False
        self._versions.note(words)
        self._unversioned_contents = unversioned
        return True

    def _equals(self) -> bool:
        """Compare all values."""
        return (
            list(map(type, self._modules)) == self._kinds
            and self._attributes == self._current_attributes()
            and _own_hooks(self._hooks) == self._own_hooks
            and self._containers == self._contents
        )

    def _current_attributes(self) -> list[object]:
        """Return the attributes that passes read; tuples of identical objects are compared very fast."""
        models: list[object] = [
            {name: value for name, value in vars(model).items() if name not in IRRELEVANT} for model in self._models
        ]
        return [*models, *[(len(space), get(space)) for space, get in self._spaces]]


class _Memory:
    """Snapshot of the memory of tensors: torch's write counts, addresses, and single words.

    Args:
        values: The tensors, among other objects.
    """

    def __init__(self, values: Iterable[object]) -> None:
        tensors = list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._placed = [tensor for tensor in tensors if _has_place(tensor)]
        self._places = list(map(_place, self._placed))
        # References that keep the memory alive.
        on_cpu = [tensor for tensor in self._placed if tensor.device.type == "cpu" and tensor.is_contiguous()]
        self._memory = [tensor.detach() for tensor in on_cpu if tensor.nbytes >= 4]
        is_large = [tensor.nbytes >= 16 and reads_words() for tensor in self._memory]
        middles = list(map(_middle, self._memory))
        self._large = Words([*compress(middles, is_large)]) if any(is_large) else None
        self._words = [c_int32.from_address(at) for at, large in zip(middles, is_large, strict=True) if not large]
        self._values = [word.value for word in self._words]

    def is_in_place(self) -> bool:
        """Return whether the addresses are unchanged."""
        return list(map(_place, self._placed)) == self._places

    def holds(self, compares_places: bool = True) -> bool:
        """Return whether the memory is unchanged."""
        return (
            list(map(_version, self._counted)) == self._versions
            and (not compares_places or self.is_in_place())
            and (self._large is None or self._large.hold())
            and [word.value for word in self._words] == self._values
        )


def _own_hooks(collections: Iterable[dict[int, Any]]) -> list[tuple[int, list[Any]]]:
    """Return the hooks of each collection, without transformers' own, which passes with more outputs register."""
    hooks = [
        (id(one), [hook for hook in one.values() if not collects_outputs(hook)]) for one in filter(None, collections)
    ]
    return [pair for pair in hooks if pair[1]]


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in OF_SAVING}


def _config(module: torch.nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def _has_place(tensor: torch.Tensor) -> bool:
    """Return whether the values are in plain memory with strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _middle(tensor: torch.Tensor) -> int:
    """Return the address of the middle word, with 64 bits if there are 16 bytes, else with 32 bits."""
    return tensor.data_ptr() + (tensor.nbytes - 4) // 8 * 4


def _fingerprints(tensors: Iterable[torch.Tensor]) -> list[NDArray[np.uint64]]:
    """Return the fingerprints of all tensors on a CPU."""
    here = [one for one in tensors if _has_place(one) and one.device.type == "cpu" and not one.is_quantized]
    return in_threads(fingerprint, here)
