"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, make one text faster."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookahead.config import LookaheadConfig, check_config
from lookahead.errors import UnsupportedArgumentError
from lookahead.values import whole_number

if TYPE_CHECKING:
    from lookahead.parallel.group import TIMEOUT, ParallelGroup, join, shard_model

__all__ = ["TIMEOUT", "ParallelGroup", "join", "scale_config", "shard_model"]


def __getattr__(name: str) -> Any:
    """Import what is first used: the process that starts ranks must neither wait for torch nor keep it in memory."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.group"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def scale_config(config: LookaheadConfig, ranks: int) -> LookaheadConfig:
    """`config` with W and G times the number of ranks, so that each rank has about as many nodes as one device had.

    Section 3.4 of the paper: the window and the guess set grow with the FLOPs of the devices. N stays as it is. Other
    methods than the paper's get as many times the nodes of a step, where those are given.

    Args:
        config: What is right for one device.
        ranks: Devices that work together.

    Raises:
        InvalidArgumentError: `config` is none, `ranks` is not positive, or the sizes become too large.
    """
    config, ranks = check_config(config), whole_number("ranks", ranks, 1)
    if config.preset == "paper":
        return replace(config, window_size=config.window_size * ranks, guess_set_size=config.guess_set_size * ranks)
    if config.step_budget is not None:
        return replace(config, step_budget=config.step_budget * ranks)
    return config


def environment_number(name: str, least: int, most: int | None = None) -> int:
    """What an environment variable says that `torchrun` sets; 0 if it is not there.

    Raises:
        InvalidArgumentError: It is no whole number, or out of range.
    """
    text = os.environ.get(name, "0")
    number = int(text) if text.isdecimal() else text
    return whole_number(f"environment variable {name}", number, least, most, "start the processes with torchrun")


def check_memory(config: LookaheadConfig, ranks: int) -> None:
    """Refuse a memory that several ranks could not keep equal.

    Raises:
        UnsupportedArgumentError: It lives for longer than a call.
    """
    if config.memory != "request" and ranks > 1:
        raise UnsupportedArgumentError(
            f'memory={config.memory!r} is not supported on {ranks} ranks: drafts must agree; use memory="request"'
        )
