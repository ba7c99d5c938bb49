"""Versions of this package and of what it stands on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lookahead-decoding"


def package_version(distribution: str = DISTRIBUTION) -> str:
    """Version of an installed distribution; a source tree that was never installed has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown (not installed)"


def versions() -> dict[str, str]:
    """What a report of results has to name so that others can repeat them."""
    return {
        "lookahead": package_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "python": platform.python_version(),
    }
