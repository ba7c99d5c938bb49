"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, decode one text faster."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookahead.config import MEMORY_SCOPES, LookaheadConfig, check_config
from lookahead.errors import UnsupportedArgumentError
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


def started_together() -> bool:
    """Whether this process is a rank, with environment variables from `torchrun` or `--parallel`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment_number(name: str, minimum: int, maximum: int | None = None) -> int:
    """Number in an environment variable that `torchrun` sets; 0 if it is missing.

    Raises:
        InvalidArgumentError: The variable is no whole number, or is out of range.
    """
    text = os.environ.get(name, "0")
    number = int(text) if text.isdecimal() else text
    return whole_number(f"environment variable {name}", number, minimum, maximum, "start the processes with torchrun")


def check_memory(config: LookaheadConfig, ranks: int) -> None:
    """Refuse a memory file, as several ranks cannot keep it equal."""
    if config.memory not in MEMORY_SCOPES and ranks > 1:
        raise UnsupportedArgumentError(
            f'memory={config.memory!r} is not supported on {ranks} ranks: drafts must agree; use memory="request"'
        )
