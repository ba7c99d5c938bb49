"""Drafting options drawn at random for any preset."""

from __future__ import annotations

from typing import Any

from lookahead import LookaheadConfig
from lookahead.config import OWNERS, PRESETS


def config_of(preset: str | None = None, **options: Any) -> LookaheadConfig:
    """A configuration of `preset` with those of the options that are about it; of all options where none is named."""
    if preset is None:
        return LookaheadConfig(**options)
    return LookaheadConfig(
        preset=preset, **{name: value for name, value in options.items() if preset in OWNERS.get(name, PRESETS)}
    )
