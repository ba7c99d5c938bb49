"""Words of memory: thousands of dictionaries, functions and tensors are checked for writes in microseconds.

CPython 3.10 to 3.12 numbers each write to a dictionary (PEP 509), and stores the number in its header. Python 3.13 does
not number writes of attributes, and later ones have no number. Without compiled loops it cannot be read quickly.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from lookahead.core.compiled import compiled

Integers = NDArray[np.int64]

_TYPE = 8
"""Offset in bytes of an object's type."""

_VERSION = 24
"""Offset in bytes of a dictionary's version."""

_CODE, _DEFAULTS = 48, 56
"""Offsets in bytes of a function's code and of its default values."""

_WRITES = 64
"""Writes of the trial; CPython replaces its own code for attributes after a few."""


@intrinsic  # type: ignore[untyped-decorator]
def _load(context: Any, address: Any) -> Any:
    """Read the 64-bit word at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@compiled
def _read(addresses: Integers, words: Integers) -> None:
    for index in range(len(addresses)):
        words[index] = _load(addresses[index])


@compiled
def _are_equal(addresses: Integers, words: Integers) -> bool:
    is_equal = True
    for index in range(len(addresses)):
        is_equal &= _load(addresses[index]) == words[index]
    return is_equal


class Words:
    """64-bit words of memory, as they are now. Their owner keeps the memory.

    Args:
        addresses: Their addresses.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = np.array(addresses, dtype=np.int64)
        self._words = self.read()

    def read(self) -> Integers:
        """Return the current words."""
        words = np.empty_like(self._addresses)
        _read(self._addresses, words)
        return words

    def note(self, words: Integers) -> None:
        """Compare with these words from now on."""
        self._words = words

    def hold(self) -> bool:
        """Return whether all words equal the noted ones."""
        return _are_equal(self._addresses, self._words)


class DictVersions(Words):
    """Versions of dictionaries, types of objects, and code of functions, as they are now.

    Args:
        dictionaries: Dictionaries. The order of an `OrderedDict` is not checked.
        objects: Objects, whose types are checked.
        functions: Python functions, whose code and default values are checked.
    """

    def __init__(
        self,
        dictionaries: Sequence[dict[Any, Any]],
        objects: Sequence[object] = (),
        functions: Sequence[FunctionType] = (),
    ) -> None:
        self._held = dictionaries, objects, functions  # their addresses stay valid
        code = [id(function) + offset for offset in (_CODE, _DEFAULTS) for function in functions]
        super().__init__([id(one) + _VERSION for one in dictionaries] + [id(one) + _TYPE for one in objects] + code)


def dictionary_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary of `vars` of a class, or of a module or an object."""
    dictionary: dict[str, Any] = space if isinstance(space, dict) else gc.get_referents(space)[0]
    return dictionary


def has_dict_versions() -> bool:
    """Return whether this Python has versions of dictionaries, and loops are compiled."""
    return reads_words() and _are_right()


def reads_words() -> bool:
    """Return whether loops are compiled, without which words cannot be read quickly."""
    return not config.DISABLE_JIT


@cache
def _are_right() -> bool:
    """Try versions on dictionaries and attributes of the kinds that models have."""
    is_known = sys.implementation.name == "cpython" and (3, 10) <= sys.version_info < (3, 13)
    if not is_known or sys.maxsize < 1 << 32:
        return False
    kinds: tuple[dict[str, Any], ...] = ({}, {"a": 0, "b": 1}, OrderedDict(a=0, b=1))
    follows_data = all(map(_follows_writes, kinds)) and _follows_attributes(_Object())
    return follows_data and _follows_classes(_OtherObject) and _follows_functions()


class _Object:
    """Object with attributes."""

    a: object = None
    b: object = None


class _OtherObject(_Object):
    """Object of another type."""


def _follows_writes(content: dict[str, Any]) -> bool:
    """Return whether the version of a dictionary changes with each write, and only then."""
    versions = DictVersions([content])
    return all(
        _is_noticed(versions, write)
        for number in range(_WRITES)
        for write in (
            partial(content.__setitem__, "a", (number,)),
            partial(content.update, b=(number,)),
            partial(content.pop, "a"),
            partial(content.setdefault, "a", number),
            content.clear,
        )
    )


def _follows_attributes(example: _Object) -> bool:
    """Return whether the version changes with each write of an attribute, and the type with the class."""
    versions = DictVersions([vars(example)], [example])
    return all(
        _is_noticed(versions, write)
        for number in range(_WRITES)
        for write in (
            partial(_set_attribute, example, number),
            partial(setattr, example, "b", (number,)),
            partial(delattr, example, "b"),
            partial(setattr, example, "__class__", _Object if number % 2 else _OtherObject),
        )
    )


def _follows_classes(example: type) -> bool:
    """Return whether the version of a class's dictionary changes with each write of an attribute."""
    dictionary: object = dictionary_of(vars(example))
    if not isinstance(dictionary, dict) or dictionary.keys() != vars(example).keys():
        return False
    versions = DictVersions([dictionary])
    return all(
        _is_noticed(versions, write)
        for number in range(_WRITES)
        for write in (partial(setattr, example, "c", (number,)), partial(delattr, example, "c"))
    )


def _follows_functions() -> bool:
    """Return whether code and default values of a function are where they are expected."""

    def example(value: int = 0) -> int:
        return value

    function = cast(FunctionType, example)
    versions = DictVersions([], (), [function])
    body = _set_attribute.__code__
    changes = partial(setattr, function, "__code__", body), partial(setattr, function, "__defaults__", (1,))
    return all(_is_noticed(versions, change) for change in changes)


def _set_attribute(example: _Object, number: int) -> None:
    """Write an attribute by bytecode, which CPython specialises for the object."""
    example.a = (number,)


def _is_noticed(versions: DictVersions, write: Callable[[], object]) -> bool:
    """Return whether `versions` change with a write, and not before it."""
    held = versions.hold()
    write()
    changed = not versions.hold()
    versions.note(versions.read())
    return held and changed
