"""Inner loops compiled by numba; as plain Python (`NUMBA_DISABLE_JIT=1`) the same code gives the same results.

Numpy records are read by name, `node["parent"]`, in both cases. Many arrays in a tuple are many arguments for the
compiler; an array of records is one.

Compiled loops are cached on disk, in one folder per state of the sources and version of numba. numba's own cache has
two faults. It recompiles a loop only when its own file has changed, but loops of other files are inlined into it, so
it would be stale after an upgrade. It also numbers argument types in an index: two processes that compile different
types at the same time get the same number, and later read arrays of one type as the other.

A folder is complete when it lists the files of all loops for drafting. The loops can then be read even from a
read-only disk.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numba.core import caching, event
from numba.core.cpu import CPUTargetOptions

from lookahead.core.files import OWN_FOLDER, replaced, user_cache
from lookahead.errors import not_of_signal

Function = TypeVar("Function", bound=Callable[..., Any])

_VECTORIZED = frozenset({"nnan", "nsz", "reassoc", "contract"})
"""Assumptions that LLVM may make to vectorise loops over many numbers."""


def compiled(
    function: Function, releases_gil: bool = False, makes_arrays: bool = False, vectorizes: bool = False
) -> Function:
    """Compile `function` at its first call. It must consist of loops over numpy arrays and numbers.

    Args:
        function: The loop.
        releases_gil: Let other threads run during the loop; only if no other thread writes to its arrays.
        makes_arrays: Whether the loop, or a function it calls, allocates arrays. Counting them takes time.
        vectorizes: Take sums and maxima in any order, assuming that no number is NaN.
    """
    loop = _compile(function, vectorizes, makes_arrays, nogil=releases_gil)
    keep_compiled(loop)
    return loop


class Loops:
    """State of the loops for drafting in this process.

    Attributes:
        awaited: Whether another process is compiling the loops, so that texts are decoded without drafts.
    """

    awaited = False


LOOPS = Loops()


def at_once(loop: Function) -> Function:
    """Return the loop, as plain Python while compilation is awaited. For loops over few numbers."""
    return cast(Function, cast(Any, loop).py_func) if LOOPS.awaited else loop


FIRST = cast(int, np.int64(0))
"""Zero for the start of loops. numba would compile a function once for the literal 0 and again for other integers."""


def inner(function: Function, vectorizes: bool = False) -> Function:
    """Compile a function that only compiled loops call: it is inlined into them and cannot be called from Python."""
    return _compile(function, vectorizes, no_cpython_wrapper=True, forceinline=True)


def _compile(function: Function, vectorizes: bool, makes_arrays: bool = False, **options: Any) -> Function:
    options["no_cfunc_wrapper"] = True
    if vectorizes:
        options["fastmath"] = set(_VECTORIZED)
    if not makes_arrays and hasattr(CPUTargetOptions, "_nrt"):
        options["_nrt"] = False  # these loops allocate no arrays: no reference counts, which take a third of their time
    return cast(Function, numba.njit(**options)(function))


class TypedLoop:
    """Compiled loop for the argument types of its first call, without checking types afterwards.

    With dozens of arrays the check takes longer than many a loop. Arguments of other types are misread, so use one
    object for arrays that are allocated in one place.

    Args:
        loop: Loop returned by `compiled`.
        runs_plain: Whether it is plain Python while compilation is awaited, which cannot call `inner` functions.
    """

    _entries: ClassVar[dict[Any, Callable[..., Any]]] = {}  # numba takes milliseconds to find the types of records

    def __init__(self, loop: Callable[..., Any], runs_plain: bool = False) -> None:
        self._loop = loop
        self._runs_plain = runs_plain
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the loop."""
        if self._entry is not None:
            return self._entry(*arguments)
        if self._runs_plain and LOOPS.awaited:
            return at_once(self._loop)(*arguments)
        key = self._loop, _kinds(arguments)
        self._entry = self._entries.get(key)
        if self._entry is not None:
            return self._entry(*arguments)
        result = self._loop(*arguments)
        try:
            types = tuple(map(numba.typeof, arguments))
            self._entry = cast(Any, self._loop).overloads[types].entry_point
        except (AttributeError, KeyError):  # not compiled, or another version of numba
            self._entry = self._loop
        self._entries[key] = cast(Callable[..., Any], self._entry)
        return result


def typed(function: Callable[..., Any]) -> TypedLoop:
    """Compile a loop over few numbers, with arguments of fixed types and without `inner` functions."""
    return TypedLoop(compiled(function), runs_plain=True)


def _kinds(argument: Any) -> Any:
    """Return a hashable key that determines the numba types of arguments."""
    if isinstance(argument, np.ndarray):
        flags = argument.flags
        return argument.dtype, argument.ndim, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
    if isinstance(argument, tuple):
        return (type(argument), *map(_kinds, argument))
    return type(argument)


@contextmanager
def on_first_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` when a loop is first compiled inside the `with` block, rather than read from the cache."""

    class Announcer(event.Listener):  # type: ignore[misc]
        announced = False

        def on_start(self, event: Any) -> None:
            if not self.announced:
                self.announced = True
                announce()

        def on_end(self, event: Any) -> None:
            """Do nothing: one announcement is enough."""

    with event.install_listener("numba:compile", Announcer()):
        yield


_PACKAGE = Path(__file__).parents[1]

_FOLDER_CAPACITY = 16
"""Number of states of the sources with cached loops, 1.3 MB each."""


@cache
def _stamp() -> str:
    """Return a hash of all sources of the package."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def loops_folder() -> Path | None:
    """Return the cache folder of the current loops; `None` if it is neither complete nor writable.

    Several environments or checkouts may be in use at once, so the `_FOLDER_CAPACITY` most recently used folders stay.
    """
    begin = f"loops-{sys.implementation.cache_tag}-numba-{numba.__version__}-"
    folder = user_cache() / OWN_FOLDER / f"{begin}{_stamp()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return folder if _is_complete(folder) else None
    with suppress(OSError):  # another process removes folders as well
        by_use = sorted(folder.parent.glob("loops-*"), key=lambda other: other.stat().st_mtime)
        for other in by_use[:-_FOLDER_CAPACITY]:
            shutil.rmtree(other)
    return folder


_held: set[str] = set()
"""Names of loop files that this process has read or written."""
_lost: set[str] = set()
"""Names of loop files that this process could not write."""


def are_kept() -> bool:
    """Return whether all loops for drafting can be read from the cache, for this kind of processor."""
    folder = loops_folder()
    return bool(numba.config.DISABLE_JIT) or (folder is not None and _is_complete(folder))


def note_all_kept() -> None:
    """Write the list of loop files, once this process has loaded all loops that drafting needs."""
    folder = loops_folder()
    if folder is None or not _held or _lost or LOOPS.awaited or are_kept():
        return
    with suppress(OSError), replaced(folder / _list_name()) as file:
        file.write("\n".join(sorted(_held)))


def _is_complete(folder: Path) -> bool:
    try:
        names = (folder / _list_name()).read_text("utf-8", "replace").split("\n")
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError):  # no list, or a damaged one
        return False


@cache
def _list_name() -> str:
    """Return the name of the list of loop files: one per kind of processor, because machines may share a folder."""
    cpu = numba.config.CPU_NAME or binding.get_host_cpu_name()
    features = numba.config.CPU_FEATURES or binding.get_host_cpu_features().flatten()
    return f"all-{hashlib.sha256(f'{cpu} {features}'.encode()).hexdigest()[:16]}"


def keep_compiled(loop: Any) -> None:
    """Make a loop (numba's dispatcher) use our cache folder."""
    # Without our folder, or with a numba that lacks the class, numba's own folder beside the sources is used.
    with suppress(AttributeError, RuntimeError):
        loop._cache = _cache_class()(loop.py_func)


@cache
def _cache_class() -> Any:
    """Return a subclass of numba's cache of compiled functions that uses our folder.

    Raises:
        AttributeError: This numba has no such classes.
        RuntimeError: There is no folder.
    """
    folder = loops_folder()
    if folder is None:
        raise RuntimeError("no folder for compiled loops")

    class Locator(caching._CacheLocator):  # type: ignore[misc]
        """Location of one function's files."""

        def __init__(self, function: Any) -> None:
            self._function = function
            self._py_file = function.__code__.co_filename  # named in numba's warnings

        def get_cache_path(self) -> str:
            return str(folder)

        def ensure_cache_path(self) -> None:
            """Do nothing: `loops_folder` made the folder, and `_save` handles one that is full or gone."""

        def get_source_stamp(self) -> str:
            return _stamp()

        def get_disambiguator(self) -> str:
            return f"{self._function.__module__}-{self._function.__code__.co_firstlineno}"

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function)

    class Files(caching.IndexDataCacheFile):  # type: ignore[misc]
        """One file for each loop and its argument types, instead of numbered files and an index."""

        def save(self, key: Any, data: Any) -> None:
            _save(self, self._name(key), (key, data))

        def load(self, key: Any) -> Any:
            return _load(self, self._name(key), key)

        def _name(self, key: Any) -> str:
            return f"{self._index_name}-{hashlib.sha256(str(key).encode()).hexdigest()[:16]}"

    class Form(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (Locator,)

    class LoopCache(caching.Cache):  # type: ignore[misc]
        _impl_class = Form

        def __init__(self, function: Any) -> None:
            super().__init__(function)
            self._cache_file = Files(str(folder), self._impl.filename_base, _stamp())

    return LoopCache


def _save(files: Any, name: str, content: tuple[Any, Any]) -> None:
    """Write a loop to a file; `content` is its key and its data."""
    try:
        files._save_data(name, content)
        _held.add(name)
    except OSError:  # a full disk, or a folder that an upgrade has removed: the loop works without the file
        _lost.add(name)


def _load(files: Any, name: str, key: Any) -> Any:
    """Read a loop from its file; return `None` if there is none."""
    try:
        index, data = files._load_data(name)
    except Exception as error:  # missing or cut short: pickle raises many kinds of errors
        not_of_signal(error)
        return None
    if index != key:
        return None
    _held.add(name)
    return data


_uncollected = Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in this process inside the `with` block.

    One block runs at a time, so that no block re-enables it for another.
    """
    with _uncollected:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
