"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, decode one text faster."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookahead.config import LookaheadConfig, check_config
from lookahead.values import whole_number

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


def scale_config(config: LookaheadConfig, ranks: int) -> LookaheadConfig:
    """Return `config` with W and G multiplied by the number of ranks, so the nodes per rank stay about equal.

    Section 3.4 of the paper: the window and the guess set grow with the FLOPs of the devices. N does not change. For
    other methods a given `step_budget` is multiplied.

    Args:
        config: A configuration for one device.
        ranks: Number of devices that work together.

    Raises:
        InvalidArgumentError: `config` is no `LookaheadConfig`, `ranks` is not positive, or a size becomes too large.
    """
    config = LookaheadConfig() if config is None else check_config(config)
    ranks = whole_number("ranks", ranks, 1)
    if config.preset == "paper":
        return replace(config, window_size=config.window_size * ranks, guess_set_size=config.guess_set_size * ranks)
    if config.step_budget is not None:
        return replace(config, step_budget=config.step_budget * ranks)
    return config
