"""Drafting options drawn at random for any preset."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lookahead import LookaheadConfig


def config_of(preset: str | None = None, **options: Any) -> LookaheadConfig:
    """A configuration of `preset` with those of the options that are about it; of all options where none is named."""
    if preset is None:
        return LookaheadConfig(**options)
    presets = {field.name: field.metadata["presets"] for field in fields(LookaheadConfig)}
    return LookaheadConfig(preset=preset, **{name: options[name] for name in options if preset in presets[name]})
