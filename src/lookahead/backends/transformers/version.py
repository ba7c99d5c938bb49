"""Which transformers is installed: what plain decoding does wrong in some versions cannot be equalled there."""

from __future__ import annotations

from transformers import __version__

TRANSFORMERS: tuple[int, ...] = tuple(int(number) for number in __version__.split(".")[:2])
"""Its major and minor version."""
