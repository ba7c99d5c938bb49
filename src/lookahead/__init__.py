"""Lookahead decoding: the same text from a causal language model, in fewer and fuller steps."""

from importlib.metadata import PackageNotFoundError, version

from lookahead.config import LookaheadConfig
from lookahead.errors import (
    InvalidArgumentError,
    LookaheadError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from lookahead.generation import LookaheadOutput, attach, detach, generate
from lookahead.statistics import Statistics, StepRecord

try:
    __version__ = version("lookahead-decoding")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "InvalidArgumentError",
    "LookaheadConfig",
    "LookaheadError",
    "LookaheadOutput",
    "Statistics",
    "StepRecord",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "detach",
    "generate",
]
