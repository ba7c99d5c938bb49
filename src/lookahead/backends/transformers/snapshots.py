"""What a model was: fingerprints of its weights, passes that leave no trace in it, and a watch for what changes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_int32
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.transformers.composition import IRRELEVANT, Composition, all_modules, collects_outputs
from lookahead.core.compiled import compiled

T = TypeVar("T")
R = TypeVar("R")

_LENGTH = 1024
"""Words of 32 bits that go into one number."""

_KEYS = np.random.default_rng().integers(1 << 32, size=_LENGTH, dtype=np.uint32) | np.uint32(1)
"""Random in each process, so that no two weights have equal fingerprints in every process. As many bits as words have,
since processors multiply those into 64 bits as fast as they read them."""


def fingerprint(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """A number for each 4 KiB of the tensor's bits: the sum of its words times random odd keys, modulo 2**64.

    The change of one word is always seen, as its product with a key is less than 2**64. That of several goes unnoticed
    with a probability of at most 2**-31 for each number that they go into: whatever the other keys are, one of them has
    at most one value at which the changes cancel out. A sum without keys would miss rows that changed places.

    Args:
        tensor: On the CPU.

    Returns:
        `[bytes // 4096 + 1]` uint64; comparable within a process.
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    full_rows = octets.nbytes // (4 * _LENGTH)
    words = octets[: full_rows * 4 * _LENGTH].view(np.uint32).reshape(full_rows, _LENGTH)
    rest = np.zeros((1, 4 * _LENGTH), dtype=np.uint8)
    rest[0, : octets.nbytes - words.nbytes] = octets[words.nbytes :]
    sums = np.empty(full_rows + 1, dtype=np.uint64)
    _add_up(words, _KEYS, sums[:full_rows])
    _add_up(rest.view(np.uint32), _KEYS, sums[full_rows:])
    return sums


@partial(compiled, releases_gil=True)
def _add_up(words: NDArray[np.uint32], keys: NDArray[np.uint32], sums: NDArray[np.uint64]) -> None:
    for row in range(words.shape[0]):
        total = np.uint64(0)
        for column in range(words.shape[1]):
            total += np.uint64(words[row, column]) * np.uint64(keys[column])
        sums[row] = total


@contextmanager
def preserved_state(model: torch.nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Restore what passes change meanwhile: attributes and buffers of the modules of `model`, and torch's generators.

    Hooks are not put back but for those of transformers: another thread may have registered or removed one.

    The rotary embeddings of a model with dynamic RoPE, for one, keep the frequencies of the longest text so far, and
    a short text puts them back: after a check pass, plain decoding would go on with other frequencies.
    """
    written: set[tuple[int, str]] = set()
    kept = [(m, dict(vars(m)), dict(m._buffers), set(m._forward_hooks)) for m in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {weight.device for weight in model.parameters() if weight.is_cuda and torch.cuda.is_available()}
    try:
        with torch.random.fork_rng(devices=devices):
            yield written
    finally:
        for module, attributes, buffers, hooks in kept:
            now = vars(module)
            names = now.keys() | attributes.keys()
            written |= {(id(module), name) for name in names if now.get(name) is not attributes.get(name)}
            hold_only(now, attributes)
            hold_only(module._buffers, buffers)
            for key in [key for key in module._forward_hooks if key not in hooks]:
                if collects_outputs(module._forward_hooks[key]):
                    del module._forward_hooks[key]
        for buffer, saved in values:
            if not buffer.is_meta and not torch.equal(buffer, saved):  # on the meta device there are no values
                with torch.no_grad():
                    buffer.copy_(saved)


def hold_only(target: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Let a dict hold these items alone. A thread that reads it meanwhile misses none of them."""
    target.update(items)
    if len(target) != len(items):
        for name in target.keys() - items.keys():
            del target[name]


_UNREAD = frozenset(vars(torch.nn.Module())) - {
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}
"""Containers of every module that are not looked into: no forward pass without gradients reads them by themselves."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_version = attrgetter("_version")


class ModelWatch:
    """Remembers what a model was, and says whether it still is that; a look takes microseconds.

    A look finds a changed `Composition`, another value of an attribute of any module, another module, hook, parameter
    or buffer, another value in a configuration, and weights that were written. Torch counts most writes; of those that
    it does not count (through `.data`, by numpy) a look finds those that change the word in the middle of a tensor on a
    CPU, and a thorough look those that change any bit of a parameter on a CPU.

    Args:
        engine: What runs its passes: the model, or a clone of it. Values that passes write into modules of the model
            are no change, if `settle` is called after each pass.
        compares_bits: Whether looks can be thorough. Takes a pass over all weights.
        composition: That of the model now.
    """

    def __init__(
        self, model: PreTrainedModel, engine: PreTrainedModel, compares_bits: bool, composition: Composition
    ) -> None:
        self._model, self._composition = model, composition
        self._runs = {id(module) for module in all_modules(engine)}
        self._note()
        self._bits = _fingerprints(model) if compares_bits else None

    def has_changed(self, thorough: bool) -> bool:
        """Whether the model has changed.

        Args:
            thorough: Compare all bits of the weights as well, which takes about as long as a step of one token.
        """
        if not (self._composition.has_same_code_around() and self._whole.holds()):
            return True
        if not thorough or self._bits is None:
            return False
        bits = _fingerprints(self._model)
        return len(bits) != len(self._bits) or not all(map(np.array_equal, bits, self._bits))

    def settle(self) -> None:
        """Take the values that the pass of this moment wrote into the model as the model's.

        Code and weights are not written by passes: another thread has changed them, which the next look finds.
        """
        if self._shared.holds() or not self._whole.weights_hold():
            return
        if self._composition.holds(self._model, after_passes=True):
            self._note()

    def _note(self) -> None:
        modules = all_modules(self._model)
        self._whole = _Snapshot(modules)
        self._shared = _Snapshot([module for module in modules if id(module) in self._runs])


class _Snapshot:
    """What modules were when this was made."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._models = [module for module in modules if isinstance(module, PreTrainedModel)]
        self._views = [vars(module).values() for module in modules if not isinstance(module, PreTrainedModel)]
        self._attributes = self._current_attributes()
        self._configs = list({id(config): config for module in modules if (config := _config(module))}.values())
        self._settings = [
            {name: copy.deepcopy(value) if isinstance(value, (dict, list)) else value for name, value in fields.items()}
            for fields in map(vars, self._configs)
        ]
        containers = [
            value
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, (dict, list, set)) and name not in _UNREAD
        ]
        self._empty: list[Any] = [container for container in containers if not container]
        self._filled: list[Any] = [container for container in containers if container]
        self._contents: list[Any] = list(map(copy.copy, self._filled))
        self._weights = _Memory(weight for module in modules for weight in module._parameters.values())
        self._others = _Memory(
            value for module in modules for value in (*module._buffers.values(), *vars(module).values())
        )

    def holds(self) -> bool:
        """Whether they are still that."""
        try:
            return (
                list(map(type, self._modules)) == self._kinds
                and self._attributes == self._current_attributes()
                and not any(self._empty)
                and self._filled == self._contents
                and [vars(config) for config in self._configs] == self._settings
                and self._weights.holds()
                and self._others.holds()
            )
        except (TypeError, ValueError, RuntimeError):  # another tensor or array is not compared to the one before it
            return False

    def weights_hold(self) -> bool:
        """Whether nobody has written into the weights."""
        return self._weights.holds()

    def _current_attributes(self) -> list[object]:
        """Which objects the modules have for attributes. Comparing tuples of the same objects takes next to no time."""
        models: list[object] = [
            {name: value for name, value in vars(model).items() if name not in IRRELEVANT} for model in self._models
        ]
        return [*models, *map(tuple, self._views)]


class _Memory:
    """What the memory of tensors held when this was made, as far as torch's counts and single words tell.

    Args:
        values: The tensors, among other objects.
    """

    def __init__(self, values: Iterable[object]) -> None:
        tensors = list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._placed = [tensor for tensor in tensors if _has_place(tensor)]
        self._places = [tensor.data_ptr() for tensor in self._placed]
        # With their memory, which would be gone if it was the tensor's no more.
        on_cpu = [tensor for tensor in self._placed if tensor.device.type == "cpu" and tensor.is_contiguous()]
        self._memory = [tensor.detach() for tensor in on_cpu if tensor.nbytes >= 4]
        self._words = [c_int32.from_address(_middle(tensor)) for tensor in self._memory]
        self._values = [word.value for word in self._words]

    def holds(self) -> bool:
        """Whether it holds the same."""
        return (
            list(map(_version, self._counted)) == self._versions
            and [tensor.data_ptr() for tensor in self._placed] == self._places
            and [word.value for word in self._words] == self._values
        )


def _config(module: torch.nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def _has_place(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory that is its own, one after another or in strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _middle(tensor: torch.Tensor) -> int:
    """Where the word in the middle of it lies."""
    return tensor.data_ptr() + (tensor.nbytes - 4) // 8 * 4


def _fingerprints(model: torch.nn.Module) -> list[NDArray[np.uint64]]:
    """Those of all parameters on a CPU."""
    weights = [
        weight
        for weight in model.parameters()
        if _has_place(weight) and weight.device.type == "cpu" and not weight.is_quantized
    ]
    return in_threads(fingerprint, weights)


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`function` of each item, in as many threads as torch has; it has to release Python's lock."""
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
