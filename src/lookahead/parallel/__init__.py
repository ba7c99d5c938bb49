"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, decode one text faster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookahead.parallel.settings import scale_config

if TYPE_CHECKING:
    from lookahead.parallel.group import TIMEOUT, ParallelGroup, join, shard_model

__all__ = ["TIMEOUT", "ParallelGroup", "join", "scale_config", "shard_model"]


def __getattr__(name: str) -> Any:
    """Import names on first use: the process that starts ranks must neither wait for torch nor keep it in memory."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.group"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
