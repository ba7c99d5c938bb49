"""`lookahead cache`: show and remove the files in the library's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from lookahead.cli import process
from lookahead.cli.rendering import Consoles, bytes_in_words
from lookahead.core.files import OWN_FOLDER, user_cache

_KINDS = {"loops-*": "compiled loops", "findings": "trials", "cost": "curves of step times"}
"""Content of the cache, by patterns of folder names."""


def show(consoles: Consoles) -> int:
    """Print the folder and the size of each kind of content, and return the exit code."""
    folder = user_cache() / OWN_FOLDER
    consoles.out.print(str(folder))
    for names, content in _KINDS.items():
        consoles.out.print(f"  {bytes_in_words(sum(map(_size, folder.glob(names)))):>8}  {content}")
    return process.OK


def clear(consoles: Consoles) -> int:
    """Remove the folder, and return the exit code."""
    folder = user_cache() / OWN_FOLDER
    size, place = _size(folder), folder.resolve()
    if place.exists():
        shutil.rmtree(place)
    if folder.is_symlink():  # later runs write to its target, so it has to exist
        place.mkdir(exist_ok=True)
    consoles.out.print(f"removed {bytes_in_words(size)} in {folder}")
    return process.OK


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
