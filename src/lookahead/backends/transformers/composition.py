"""Composition of a model: everything except weights that determines its output.

A trial proves exactness for one composition. A new hook, `forward`, module, class or mode makes a new composition,
which needs its own trial.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from operator import attrgetter, itemgetter
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.surroundings import GLOBAL_HOOKS, Namespace, Surroundings, identity
from lookahead.errors import not_of_signal

IRRELEVANT = frozenset(
    {
        *("generate", "generation_config", "rope_deltas", "max_seq_len_cached", "_output_capturing_hooks_installed"),
        *("_previous_max_cache_length", "_compiled_call", "_last_compile_config"),  # of static caches
        *("_tp_plan", "_pp_plan", "_fsdp_plan", "_no_split_modules", "_skip_keys_device_placement"),  # of loading
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"),
    }
)
"""Attributes of a module that no forward pass reads, or that repeat inputs of a pass."""

OF_SAVING = frozenset({"architectures", "dtype"})
"""Settings that `save_pretrained` writes in another form; the types of weights are compared themselves."""

_NUMBERS = (bool, int, float, complex, str, type(None))
_COLLECTIONS = (list, tuple, set)
_TENSOR = "a tensor"
_NESTED = "nested"
_MOST_ITEMS = 64
_DEEPEST = 3
"""Items of a container, and levels of containers, whose plain values are compared."""

_UNREAD = frozenset(vars(torch.nn.Module())) - {"training"}
"""Containers of every module."""

Place = tuple[int, str]
"""Index of a module among all modules, and the name of an attribute."""


def all_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return `model` and its submodules, each once; three times as fast as `model.modules()`."""
    modules: list[torch.nn.Module] = [model]
    ids = {id(model)}
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in ids:
                ids.add(id(child))
                modules.append(child)
    return modules


class Composition:
    """Modules of a model with their code, hooks, modes, numbers and configurations.

    Weights, buffers and numbers written by passes are not included. It has no reference to the model.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = all_modules(model)
        spaces = list(map(vars, modules))
        self._modules = list(map(id, modules))
        self._kinds = list(map(type, modules))
        self._hooks = _hooks(spaces)
        self._weights = _weights(spaces)
        self._configs = _configs(spaces)
        self._settings = [copied(vars(config)) for config in _configs_of_modules(spaces)]
        self._surroundings = Surroundings(model)
        self._written: set[Place] = set()
        self._record(spaces)
        self._is_gone = False  # a part was freed, and another object may have its id
        parts = (
            value for space in spaces for name, value in space.items() if name not in IRRELEVANT and callable(value)
        )
        hooks = (hook for _, present in _hook_lists(spaces) for hook in present.values())
        self._guards = [self._guard(part) for part in (*modules, *parts, *hooks)]

    def holds(self, model: PreTrainedModel, after_passes: bool = False) -> bool:
        """Return whether the model still has this composition. It takes about a microsecond for each module.

        Args:
            model: The model.
            after_passes: Whether passes have run since the last check. They may have written numbers, which are
                accepted.
        """
        modules = all_modules(model)
        spaces = list(map(vars, modules))
        return (
            not self._is_gone
            and list(map(id, modules)) == self._modules
            and list(map(type, modules)) == self._kinds
            and _hooks(spaces) == self._hooks
            and _weights(spaces) == self._weights
            and self._has_same_configs(spaces)
            and self._surroundings.hold()
            and (self._looks_same(spaces) or self._has_same_attributes(spaces, after_passes))
        )

    def has_same_code_around(self) -> bool:
        """Return whether the code outside of the modules is unchanged."""
        return self._surroundings.hold()

    def expect_writes(self, written: Iterable[tuple[int, str]]) -> None:
        """Mark attributes that passes write.

        Args:
            written: Pairs of the `id` of a module and the name of an attribute.
        """
        indices = {module: index for index, module in enumerate(self._modules)}
        self._written |= {
            (indices[module], name) for module, name in written if module in indices and name != "training"
        }

    def _record(self, spaces: Sequence[Namespace]) -> None:
        """Record attributes in a form for fast comparisons."""
        tokens = list(map(_tokens, spaces))
        numbers = [
            [name for name, token in named.items() if token is space[name]]
            for named, space in zip(tokens, spaces, strict=True)
        ]
        # A compiled or scripted module has no number at all, not even `training`.
        getters = [itemgetter(*names) if names else len for names in numbers]
        others = [
            (index, name, token)
            for index, named in enumerate(tokens)
            for name, token in named.items()
            if name not in numbers[index]
        ]
        lengths = list(map(len, spaces))
        values = [get(space) for get, space in zip(getters, spaces, strict=True)]
        self._recorded = tokens, getters, values, others, lengths  # one assignment, because other threads may read it

    def _has_same_configs(self, spaces: Sequence[Namespace]) -> bool:
        now = list(map(vars, _configs_of_modules(spaces)))
        return are_same(now, self._settings) or _configs(spaces) == self._configs

    def _looks_same(self, spaces: Sequence[Namespace]) -> bool:
        """Return whether all attributes look unchanged; `False` may be wrong."""
        _, getters, values, others, lengths = self._recorded
        try:
            return (
                list(map(len, spaces)) == lengths
                and [get(space) for get, space in zip(getters, spaces, strict=True)] == values
                and all(_token(spaces[index].get(name)) == token for index, name, token in others)
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # an attribute was deleted, or is a tensor now
            return False

    def _has_same_attributes(self, spaces: Sequence[Namespace], after_passes: bool) -> bool:
        now = list(map(_tokens, spaces))
        before = self._recorded[0]
        changed = {
            (index, name)
            for index, (new, old) in enumerate(zip(now, before, strict=True))
            if new != old
            for name in new.keys() | old.keys()
            if new.get(name) != old.get(name)
        } - self._written
        tokens = [named[index].get(name) for index, name in changed for named in (now, before)]
        if changed and not (after_passes and all(map(_is_written, tokens))):
            return False
        self._written |= changed
        self._record(spaces)
        return True

    def _guard(self, part: Any) -> object:
        """Return a weak reference that reports the end of a part; the part itself if it supports none."""
        try:
            return weakref.ref(part, self._record_end)
        except TypeError:
            return part

    def _record_end(self, _: object) -> None:
        self._is_gone = True


def _tokens(space: Namespace) -> dict[str, object]:
    """Return comparable values of the attributes that may affect a module's output."""
    names = [name for name in space if name not in _UNREAD and name not in IRRELEVANT]
    tokens = {name: _token(space[name]) for name in names}
    return {name: token for name, token in tokens.items() if token is not _UNKNOWN}


_UNKNOWN = object()


def _token(value: object) -> object:
    """Return a comparable value: plain values, collections as text, callables by identity, a marker for tensors."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, _COLLECTIONS) and all(isinstance(item, _NUMBERS) for item in value):
        return repr(value)
    if callable(value):
        return "callable", identity(value)
    leaves = _leaves(value)
    return _UNKNOWN if leaves is None else (_NESTED, repr(leaves))


def _leaves(value: object, depth: int = 0) -> object:
    """Return the plain values in a container or an object, with their names; `None` for other and for large ones."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value)) if all(isinstance(item, _NUMBERS) for item in value) else None
    items = _items(value)
    if not items or depth == _DEEPEST:
        return None
    return [(repr(name), _leaves(item, depth + 1)) for name, item in items.items() if isinstance(name, _NUMBERS)]


def _items(value: object) -> dict[object, object]:
    """Return the items of a container or the attributes of an object; none of other and of large ones."""
    if isinstance(value, (list, tuple)):
        items = dict[object, object](enumerate(value))
    elif isinstance(value, dict):  # other mappings may load weights
        items = dict(value)
    elif isinstance(value, (*_NUMBERS, torch.Tensor, PreTrainedConfig)) or callable(value):
        return {}
    else:
        items = dict(getattr(value, "__dict__", ()))
    return items if len(items) <= _MOST_ITEMS else {}


def containers_of(value: object, depth: int = 0) -> Iterator[Any]:
    """Yield the changeable containers in an attribute, itself included, and the attributes of objects in it."""
    if isinstance(value, (dict, list, set)):
        yield value
    if depth == _DEEPEST or not (items := _items(value)):
        return
    if not isinstance(value, (dict, list, tuple)):
        yield vars(value)
    for item in items.values():
        yield from containers_of(item, depth + 1)


def _is_written(token: object) -> bool:
    """Return whether passes may write this value: a number, `None`, a tensor, or something in a container."""
    is_nested = isinstance(token, tuple) and token[0] == _NESTED
    is_number = isinstance(token, int | float | complex) and type(token) is not bool
    return token is None or token is _TENSOR or is_nested or is_number


def _hook_lists(spaces: Sequence[Namespace]) -> list[tuple[int, Mapping[int, Any]]]:
    """Return non-empty collections of hooks with the index of their module; -1 for global hooks."""
    after = [(index, hooks) for index, space in enumerate(spaces) if (hooks := space.get("_forward_hooks"))]
    before = [(index, hooks) for index, space in enumerate(spaces) if (hooks := space.get("_forward_pre_hooks"))]
    return [*after, *before, *((-1, hooks) for hooks in GLOBAL_HOOKS if hooks)]


def _hooks(spaces: Sequence[Namespace]) -> list[object]:
    """Return the hooks of all modules, without transformers' own, which passes register."""
    result: list[object] = []
    for index, hooks in _hook_lists(spaces):
        space = spaces[index] if index >= 0 else {}
        with_kwargs = {**space.get("_forward_hooks_with_kwargs", {}), **space.get("_forward_pre_hooks_with_kwargs", {})}
        own = [(identity(hook), key in with_kwargs) for key, hook in hooks.items() if not collects_outputs(hook)]
        result += [(index, own)] if own else []
    return result


def collects_outputs(hook: Any) -> bool:
    """Return whether a hook is transformers' own, registered in a pass that returns hidden states or attentions."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _weights(spaces: Sequence[Namespace]) -> list[tuple[object, ...]]:
    """Return the classes, types and devices of all weights; quantised ones have other kernels."""
    weights = [weight for space in spaces for weight in space["_parameters"].values() if weight is not None]
    return list(zip(map(type, weights), map(_NUMBER_TYPE, weights), map(_DEVICE, weights), strict=True))


_NUMBER_TYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def _configs_of_modules(spaces: Sequence[Namespace]) -> list[Any]:
    """Return the configurations that modules refer to, each once."""
    configs = {id(config): config for space in spaces if (config := space.get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "__dict__")]


def copied(values: dict[str, object]) -> dict[str, object]:
    """Return a deep copy of settings."""
    try:
        return copy.deepcopy(values)
    except Exception as error:  # it contains a lock, for example; changes inside values are not detected then
        not_of_signal(error)
        return dict(values)


def are_same(first: object, second: object) -> bool:
    """Return whether settings are equal; `False` if they cannot be compared."""
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):  # arrays, for example
        return False


def _configs(spaces: Sequence[Namespace]) -> list[tuple[int, dict[str, object]]]:
    """Return the configurations of modules, nested ones included, with their values."""
    pending = _configs_of_modules(spaces)
    values: dict[int, dict[str, object]] = {}
    while pending:
        config = pending.pop()
        if id(config) not in values:
            values[id(config)] = {
                name: _setting(value) for name, value in vars(config).items() if name not in OF_SAVING
            }
            pending += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(values.items())


def _setting(value: object) -> object:
    if isinstance(value, _NUMBERS):
        return value
    return repr(value) if isinstance(value, list | tuple | set | dict) else id(value)


_OF_DECODING = frozenset(name for name, value in vars(GenerationMixin).items() if callable(value)) - {"generate"}
"""Methods that transformers calls in `generate` to prepare and decode a text."""


def own_method(model: PreTrainedModel) -> str | None:
    """Return the name of a decoding method of this object, or a decoding loop of its class; `None` if there is none.

    Other methods, for example to prepare inputs, may differ: a miniature tries them.
    """
    replaced = sorted(vars(model).keys() & _OF_DECODING)
    has_loop = getattr(type(model), "_sample", None) is not GenerationMixin._sample
    return next(iter(replaced), "_sample" if has_loop else None)


def own_generate(model: Any) -> Any:
    """Return the `generate` of this object that replaces its class's; `None` if it leads to this library.

    `attach` sets one, and so do repositories that call this library. A function around one of these leads here as well.
    """
    method = vars(model).get("generate")
    return None if method is None or _leads_here(method) else method


def _leads_here(method: Any) -> bool:
    function = unwrap(method, stop=lambda one: isinstance(one, partial))
    function = getattr(function, "func", function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    if "lookahead" in (*names, getattr(function, "__module__", "").partition(".")[0]):
        return True
    try:
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    except ValueError:  # a variable without a value
        return False
    return any(isinstance(value, partial) and _leads_here(value) for value in held)
