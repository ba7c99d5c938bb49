"""Arrays in the content of a file that may be cut short, damaged, or somebody else's."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

MOST_BYTES = 1 << 30
"""Most that a file, all of its arrays, or the memory made of them may take: what declares more is no memory of ours."""


class DamagedFileError(ValueError):
    """The content is not what was saved; the message says what is wrong with it, but not which file it is."""


class StoredArrays(Mapping[str, NDArray[Any]]):
    """The arrays of an npz file, each read when it is asked for, and read-only.

    No object is ever unpickled, and nothing is allocated by what a header says: an array is a view of the bytes that
    are there.

    Args:
        content: The file's.

    Raises:
        DamagedFileError: It is no such file, or too large. Asking for an array raises it as well.
    """

    def __init__(self, content: bytes) -> None:
        if not content:
            raise DamagedFileError("it is empty")
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            sizes = {entry.filename: entry.file_size for entry in self._archive.infolist()}
        except Exception as error:  # zipfile raises all kinds for damaged files
            raise DamagedFileError("it is cut short, or something else than a memory") from error
        if sum(sizes.values()) > MOST_BYTES:
            raise DamagedFileError("it declares more data than a memory can have")
        self._names = [name.removesuffix(".npy") for name in sizes if name.endswith(".npy")]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise DamagedFileError(f"it lacks the array {name!r}")
        try:
            return _parsed(name, self._archive.read(f"{name}.npy"))
        except DamagedFileError:
            raise
        except Exception as error:  # zipfile, zlib and numpy raise all kinds for damaged files
            raise DamagedFileError(f"its array {name!r} is damaged") from error


def _parsed(name: str, content: bytes) -> NDArray[Any]:
    stream = io.BytesIO(content)
    version = npy.read_magic(stream)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, in_columns, dtype = read_header(stream)
    if dtype.hasobject:
        raise DamagedFileError(f"its array {name!r} holds Python objects")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise DamagedFileError(f"its array {name!r} has not as many numbers as it declares")
    array: NDArray[Any] = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if in_columns else "C")


def expect(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: DTypeLike, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """The array called `name`.

    Args:
        arrays: Where it is.
        name: What it is called.
        dtype: Its type; numbers of a floating one must be finite.
        shape: Its shape; `None` stands for any size.

    Raises:
        DamagedFileError: It is not there, or another one.
    """
    if name not in arrays:
        raise DamagedFileError(f"it lacks the array {name!r}")
    array = arrays[name]
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(array.shape, shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not fits:
        raise DamagedFileError(f"its array {name!r} has another type or shape ({array.dtype}, {list(array.shape)})")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DamagedFileError(f"its array {name!r} holds numbers that are not finite")
    return array
