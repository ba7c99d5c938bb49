"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, make one text faster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.parallel.group import TIMEOUT, ParallelGroup, join, shard_model
    from lookahead.parallel.runner import Traffic
    from lookahead.parallel.scaling import scale_config
    from lookahead.parallel.split import Split, split_tree

__all__ = ["TIMEOUT", "ParallelGroup", "Split", "Traffic", "join", "scale_config", "shard_model", "split_tree"]

_LATE = {
    "TIMEOUT": "group",
    "ParallelGroup": "group",
    "Split": "split",
    "Traffic": "runner",
    "join": "group",
    "scale_config": "scaling",
    "shard_model": "group",
    "split_tree": "split",
}


def __getattr__(name: str) -> Any:
    """Import what is first used: the process that starts ranks must neither wait for torch nor keep it in memory."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
