"""The folder in which programs keep what they can make anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """Where the operating system has users' caches."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder) if os.path.isabs(folder) else home / ".cache"
