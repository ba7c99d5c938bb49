"""Lookahead decoding: the same text from a causal language model, in fewer and fuller steps."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lookahead.config import LookaheadConfig
from lookahead.errors import (
    InvalidArgumentError,
    LookaheadError,
    LookaheadWarning,
    ParallelError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from lookahead.statistics import Statistics, StepRecord

if TYPE_CHECKING:
    from lookahead.drafting import NGramPool
    from lookahead.generation import attach, detach, generate
    from lookahead.output import LookaheadOutput

try:
    __version__ = version("lookahead-decoding")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "InvalidArgumentError",
    "LookaheadConfig",
    "LookaheadError",
    "LookaheadOutput",
    "LookaheadWarning",
    "NGramPool",
    "ParallelError",
    "Statistics",
    "StepRecord",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "detach",
    "generate",
]

_LATE = {
    "LookaheadOutput": "lookahead.output",
    "NGramPool": "lookahead.drafting",
    "attach": "lookahead.generation",
    "detach": "lookahead.generation",
    "generate": "lookahead.generation",
}


def __getattr__(name: str) -> Any:
    """Import the doors when they are first used: torch and transformers take seconds, a configuration needs neither."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
