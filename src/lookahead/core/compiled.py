"""Inner loops, compiled by numba; as plain Python (`NUMBA_DISABLE_JIT=1`) the same code gives the same results.

Records of numpy are read by name, `node["parent"]`, which both understand. A tuple of many arrays is many arguments to
the compiler, an array of records is one.

Compiled loops are kept between processes, in a folder for each state of the sources, and each numba. numba by itself
compiles a loop anew when the file that it stands in has changed. But other files' loops become part of it: after a
change of those, as by an upgrade, it would go on as it was. And it numbers the types that a loop was compiled for in an
index: two processes that compile for different types at once give both the same number, and from then on arrays of one
type are read as those of the other.

A folder is complete where it names the files of all loops that drafting needs: then these are read, also where nothing
can be written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numba.core import caching, event
from numba.core.cpu import CPUTargetOptions

from lookahead.core.files import OWN_FOLDER, replaced, user_cache

Function = TypeVar("Function", bound=Callable[..., Any])

_VECTORIZED = frozenset({"nnan", "nsz", "reassoc", "contract"})
"""What LLVM may suppose where loops over many numbers are to be vectorised."""


def compiled(
    function: Function, releases_gil: bool = False, makes_arrays: bool = False, vectorizes: bool = False
) -> Function:
    """Compile `function` at its first call. It keeps to loops over numpy arrays and numbers.

    Args:
        function: The loop.
        releases_gil: Let other threads run meanwhile: only for loops over arrays that no other thread writes to.
        makes_arrays: Whether it makes arrays, or calls what does. Those have to be counted, which takes time.
        vectorizes: Take sums and maxima in any order, supposing that all are numbers (none is NaN).
    """
    loop = _compile(function, vectorizes, makes_arrays, nogil=releases_gil)
    keep_compiled(loop)
    return loop


class Loops:
    """The state of the loops of drafting in this process.

    Attributes:
        awaited: Whether another process compiles them, so that texts go on without.
    """

    awaited = False


LOOPS = Loops()


def at_once(loop: Function) -> Function:
    """The loop; as plain Python as long as it is awaited. For loops over few numbers."""
    return cast(Function, cast(Any, loop).py_func) if LOOPS.awaited else loop


FIRST = cast(int, np.int64(0))
"""A zero for loops to begin with. numba compiles what is called with the literal twice: for 0, and for all numbers; and
where a loop goes on with another number than its literal, it goes through all types once more."""


def inner(function: Function, vectorizes: bool = False) -> Function:
    """Like `compiled`, for what only compiled loops call: it becomes part of them, and Python must not call it."""
    return _compile(function, vectorizes, no_cpython_wrapper=True, forceinline=True)


def _compile(function: Function, vectorizes: bool, makes_arrays: bool = False, **options: Any) -> Function:
    options["no_cfunc_wrapper"] = True
    if vectorizes:
        options["fastmath"] = set(_VECTORIZED)
    if not makes_arrays and hasattr(CPUTargetOptions, "_nrt"):
        options["_nrt"] = False  # these loops make no array, so none is counted: a third of their time
    return cast(Function, numba.njit(**options)(function))


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
            types = tuple(map(numba.typeof, arguments))
            self._entry = cast(Any, self._loop).overloads[types].entry_point
        except (AttributeError, KeyError):  # not compiled, or by a numba that keeps it elsewhere
            self._entry = self._loop
        self._entries[key] = cast(Callable[..., Any], self._entry)
        return result


def _kinds(argument: Any) -> Any:
    """What the types that numba gives arguments depend on."""
    if isinstance(argument, np.ndarray):
        flags = argument.flags
        return argument.dtype, argument.ndim, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
    if isinstance(argument, tuple):
        return (type(argument), *map(_kinds, argument))
    return type(argument)


@contextmanager
def on_first_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` when a loop is first compiled meanwhile, rather than read from what numba kept of it."""

    class Announcer(event.Listener):  # type: ignore[misc]
        announced = False

        def on_start(self, event: Any) -> None:
            if not self.announced:
                self.announced = True
                announce()

        def on_end(self, event: Any) -> None:
            """It is said once."""

    with event.install_listener("numba:compile", Announcer()):
        yield


_PACKAGE = Path(__file__).parents[1]

_KEPT = 16
"""States of the sources whose loops are kept, 1.3 MB each."""


@cache
def _stamp() -> str:
    """What all sources of the package are known by."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def loops_folder() -> Path | None:
    """The folder of today's loops in the user's cache; `None` where it is neither complete nor can be written to.

    Several states of the sources are in use at once where there are several environments or checkouts. Folders beyond
    the `_KEPT` that were used last are removed.
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
        for other in by_use[:-_KEPT]:
            shutil.rmtree(other)
    return folder


_held: set[str] = set()
"""Names of the files of the loops that this process has read or kept."""
_lost: set[str] = set()
"""Names of those that it could not keep."""


def are_kept() -> bool:
    """Whether all loops of drafting can be read, for this kind of processor."""
    folder = loops_folder()
    return bool(numba.config.DISABLE_JIT) or (folder is not None and _is_complete(folder))


def note_all_kept() -> None:
    """Write down the files of the loops of this process, once these are all loops that drafting needs."""
    folder = loops_folder()
    if folder is None or not _held or _lost or LOOPS.awaited or are_kept():
        return
    with suppress(OSError), replaced(folder / _list_name()) as file:
        file.write("\n".join(sorted(_held)))


def _is_complete(folder: Path) -> bool:
    try:
        names = (folder / _list_name()).read_text("utf-8", "replace").split("\n")
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError):  # none, or a damaged one
        return False


@cache
def _list_name() -> str:
    """Name of the file that names all others: one for each kind of processor, as machines may share a folder."""
    cpu = numba.config.CPU_NAME or binding.get_host_cpu_name()
    features = numba.config.CPU_FEATURES or binding.get_host_cpu_features().flatten()
    return f"all-{hashlib.sha256(f'{cpu} {features}'.encode()).hexdigest()[:16]}"


def keep_compiled(loop: Any) -> None:
    """Let a loop (numba's dispatcher) be read from what it was compiled to before, and be kept when it is compiled."""
    # Another numba may have no such class, and there may be no folder; numba's own choice is one beside the sources.
    with suppress(AttributeError, RuntimeError):
        loop._cache = _cache_class()(loop.py_func)


@cache
def _cache_class() -> Any:
    """numba's cache of compiled functions, in our folder.

    Raises:
        AttributeError: numba has no such classes.
        RuntimeError: There is no folder.
    """
    folder = loops_folder()
    if folder is None:
        raise RuntimeError("no folder for compiled loops")

    class Locator(caching._CacheLocator):  # type: ignore[misc]
        """Says where one function is kept."""

        def __init__(self, function: Any) -> None:
            self._function = function
            self._py_file = function.__code__.co_filename  # numba names it where it cannot keep a loop

        def get_cache_path(self) -> str:
            return str(folder)

        def ensure_cache_path(self) -> None:
            """It was there; see `_save` for one that is full, read-only or gone by now."""

        def get_source_stamp(self) -> str:
            return _stamp()

        def get_disambiguator(self) -> str:
            return f"{self._function.__module__}-{self._function.__code__.co_firstlineno}"

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function)

    class Files(caching.IndexDataCacheFile):  # type: ignore[misc]
        """A file for each loop and the types that it takes, instead of numbered files and an index of them."""

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
    """Keep a loop, whose key comes first, in a file."""
    try:
        files._save_data(name, content)
        _held.add(name)
    except OSError:  # a full disk, or a folder that an upgrade has removed: the loop runs all the same
        _lost.add(name)


def _load(files: Any, name: str, key: Any) -> Any:
    """What is kept of a loop; `None` if nothing is."""
    try:
        kept, data = files._load_data(name)
    except Exception:  # not there, or not whole, for which pickle has many errors
        return None
    if kept != key:
        return None
    _held.add(name)
    return data
