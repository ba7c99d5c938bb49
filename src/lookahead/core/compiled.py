"""Inner loops, compiled by numba; as plain Python (`NUMBA_DISABLE_JIT=1`) the same code gives the same results.

Records of numpy are read by name, `node["parent"]`, which both understand. A tuple of many arrays is many arguments to
the compiler, an array of records is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from lookahead.core.kept_loops import keep_compiled

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    _numba: Any = import_module("numba")
except ImportError:
    _numba = None

IS_COMPILED = _numba is not None
"""Whether loops are compiled. Where they are not, operations on whole arrays may be faster than they are."""


_VECTORIZED = frozenset({"nnan", "nsz", "reassoc", "contract"})
"""What LLVM may suppose where loops over many numbers are to be vectorised."""


def compiled(
    function: Function, releases_gil: bool = False, makes_arrays: bool = False, vectorizes: bool = False
) -> Function:
    """Compile `function` at its first call, if numba is there. It keeps to loops over numpy arrays and numbers.

    Args:
        function: The loop.
        releases_gil: Let other threads run meanwhile: only for loops over arrays that no other thread writes to.
        makes_arrays: Whether it makes arrays, or calls what does. Those have to be counted, which takes time.
        vectorizes: Take sums and maxima in any order, supposing that all are numbers (none is NaN).
    """
    return _compile(function, {"nogil": releases_gil, **_fast(vectorizes)}, makes_arrays)


FIRST = cast(int, np.int64(0))
"""A zero for loops to begin with. numba compiles what is called with the literal twice: for 0, and for all numbers."""


def inner(function: Function, vectorizes: bool = False) -> Function:
    """Like `compiled`, for what only compiled loops call: it becomes part of them, and Python must not call it."""
    return _compile(function, {"no_cpython_wrapper": True, "forceinline": True, **_fast(vectorizes)})


def _fast(vectorizes: bool) -> dict[str, Any]:
    return {"fastmath": set(_VECTORIZED)} if vectorizes else {}


def _compile(function: Function, options: dict[str, Any], makes_arrays: bool = False) -> Function:
    if _numba is None:
        return function
    options = {"no_cfunc_wrapper": True} | options
    if not makes_arrays and hasattr(import_module("numba.core.cpu").CPUTargetOptions, "_nrt"):
        options["_nrt"] = False  # these loops make no array, so none is counted: a third of their time
    loop = _numba.njit(**options)(function)
    keep_compiled(loop)
    return cast(Function, loop)


class TypedLoop:
    """A loop for arguments of the types that its first call has and no others, without a look at what types they have.

    With dozens of arrays that look takes longer than many a loop. Arguments of other types are misread, so this is for
    arrays that are made in one place, and each object that makes some has its own.

    Args:
        loop: What `compiled` gave.
    """

    _entries: ClassVar[dict[Any, Callable[..., Any]]] = {}  # asking numba for the types of records takes milliseconds

    def __init__(self, loop: Callable[..., Any]) -> None:
        self._loop = loop
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run it."""
        if self._entry is not None:
            return self._entry(*arguments)
        key = self._loop, _kinds(arguments)
        self._entry = self._entries.get(key)
        if self._entry is not None:
            return self._entry(*arguments)
        result = self._loop(*arguments)
        try:
            types = tuple(map(_numba.typeof, arguments))
            self._entry = cast(Any, self._loop).overloads[types].entry_point
        except (AttributeError, KeyError):  # not compiled, or by a numba that keeps it elsewhere
            self._entry = self._loop
        self._entries[key] = cast(Callable[..., Any], self._entry)
        return result


def _kinds(argument: Any) -> Any:
    """What the types that numba gives arguments depend on."""
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim, argument.flags.num
    if isinstance(argument, tuple):
        return (type(argument), *map(_kinds, argument))
    return type(argument)


@contextmanager
def on_first_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` when a loop is first compiled meanwhile, rather than read from what numba kept of it."""
    if _numba is None:
        yield
        return
    event = import_module("numba.core.event")

    class Announcer(event.Listener):  # type: ignore[misc, name-defined]
        announced = False

        def on_start(self, event: Any) -> None:
            if not self.announced:
                self.announced = True
                announce()

        def on_end(self, event: Any) -> None:
            """It is said once."""

    with event.install_listener("numba:compile", Announcer()):
        yield
