"""Where a page goes: refused early, written whole."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from lookahead.errors import InvalidArgumentError


def check_path(path: Path) -> None:
    """Refuse a path that nothing can be written to.

    Raises:
        InvalidArgumentError: The message says why.
    """
    if path.is_dir():
        raise InvalidArgumentError(f"trace: {path} is a folder; give the name of a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise InvalidArgumentError(f"trace: {path} may not be written; choose another file")
    if not path.exists() or path.is_file():
        try:
            with NamedTemporaryFile(dir=_folder(path), prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise _refusal(path, error) from error


def write_whole(path: Path, page: str) -> None:
    """Write a file that is there whole or not at all; what is no regular file, such as a pipe, gets it as it comes.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(page, encoding="utf-8")
            return
        mode = path.stat().st_mode if path.exists() else None
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=_folder(path), prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask() if mode is None else mode)
                os.replace(file.name, path.resolve())
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise _refusal(path, error) from error


def _folder(path: Path) -> Path:
    """The folder of the file that a symbolic link leads to: from another file system nothing could be moved there."""
    return Path(os.path.realpath(path)).parent


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _refusal(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace: {path} cannot be written: {error.strerror or error}; choose another file")
