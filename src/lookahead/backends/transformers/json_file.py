"""Files of JSON in the user's cache directory, one for each thing that they are about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookahead.core.files import replaced, user_cache


def cache_folder(name: str) -> Path:
    """A folder in the user's cache directory."""
    return user_cache() / "lookahead-decoding" / name


def file_about(folder: Path, setting: Mapping[str, Any]) -> Path:
    """The file in `folder` for a setting of plain values, whether or not there is one yet."""
    text = json.dumps(setting, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read_about(path: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else, or is about another setting.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("setting") != json.loads(json.dumps(setting)):
        raise ValueError("it is about another setting")
    return content


def write_about(path: Path, setting: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Put `content` in place of what the file held: all of it or, if that fails, nothing.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        json.dump({"setting": dict(setting), **content}, file)
