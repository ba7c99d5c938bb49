"""Where compiled loops are kept between processes: a folder for each state of the sources, and each numba.

numba by itself compiles a loop anew when the file that it stands in has changed. But other files' loops become part of
it: after a change of those, as by an upgrade, it would go on as it was. And it numbers the types that a loop was
compiled for in an index: two processes that compile for different types at once give both the same number, and from
then on arrays of one type are read as those of the other.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lookahead.core.files import user_cache

_PACKAGE = Path(__file__).parents[1]


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
    """The folder of today's loops; `None` where none can be written to. Those of earlier sources are removed."""
    version = import_module("numba").__version__
    begin = f"loops-{sys.implementation.cache_tag}-numba-{version}-"
    user = user_cache() / "lookahead-decoding"
    given = import_module("numba").config.CACHE_DIR
    for parent in (*([Path(given)] if given else []), _PACKAGE / "__pycache__", user):
        folder = parent / f"{begin}{_stamp()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        for other in parent.glob(f"{begin}*"):
            if other != folder:
                with suppress(OSError):
                    shutil.rmtree(other)
        return folder
    return None


def keep_compiled(loop: Any) -> None:
    """Let a loop (numba's dispatcher) be read from what it was compiled to before, and be kept when it is compiled."""
    try:
        loop._cache = _cache_class()(loop.py_func)
    except (AttributeError, RuntimeError):  # another numba, or no folder that could be written to
        with suppress(RuntimeError):
            loop.enable_caching()


@cache
def _cache_class() -> Any:
    """numba's cache of compiled functions, in our folder.

    Raises:
        AttributeError: numba has no such classes.
        RuntimeError: There is no folder.
    """
    caching, folder = import_module("numba.core.caching"), loops_folder()
    if folder is None:
        raise RuntimeError("no folder for compiled loops")

    class Locator(caching._CacheLocator):  # type: ignore[misc, name-defined]
        """Says where one function is kept."""

        def __init__(self, function: Any) -> None:
            self._function = function
            self._py_file = function.__code__.co_filename  # numba names it where it cannot keep a loop

        def get_cache_path(self) -> str:
            return str(folder)

        def get_source_stamp(self) -> str:
            return _stamp()

        def get_disambiguator(self) -> str:
            return f"{self._function.__module__}-{self._function.__code__.co_firstlineno}"

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function)

    class Files(caching.IndexDataCacheFile):  # type: ignore[misc, name-defined]
        """A file for each loop and the types that it takes, instead of numbered files and an index of them."""

        def save(self, key: Any, data: Any) -> None:
            with suppress(OSError):  # a full disk, or a folder that an upgrade has removed: the loop runs all the same
                self._save_data(self._name(key), (key, data))

        def load(self, key: Any) -> Any:
            try:
                kept, data = self._load_data(self._name(key))
            except Exception:  # not there, or not whole, for which pickle has many errors
                return None
            return data if kept == key else None

        def _name(self, key: Any) -> str:
            return f"{self._index_name}-{hashlib.sha256(str(key).encode()).hexdigest()[:16]}"

    class Form(caching.CompileResultCacheImpl):  # type: ignore[misc, name-defined]
        _locator_classes = (Locator,)

    class LoopCache(caching.Cache):  # type: ignore[misc, name-defined]
        _impl_class = Form

        def __init__(self, function: Any) -> None:
            super().__init__(function)
            self._cache_file = Files(str(folder), self._impl.filename_base, _stamp())

    return LoopCache
