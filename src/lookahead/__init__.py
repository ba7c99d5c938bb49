"""Lookahead decoding: the same text from a causal language model, in fewer and fuller steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.api.generation import attach, detach, generate
    from lookahead.backends.llama_cpp.model import load_gguf
    from lookahead.config import LookaheadConfig
    from lookahead.core.statistics import Statistics, StepRecord
    from lookahead.drafting import NGramPool
    from lookahead.errors import (
        InvalidArgumentError,
        LookaheadError,
        LookaheadWarning,
        ModelChangedError,
        ParallelError,
        UnsupportedArgumentError,
        UnsupportedModelError,
    )
    from lookahead.serving import Engine, RequestHandle, TokenEvent
    from lookahead.serving.output import LookaheadOutput
    from lookahead.trace import Trace

    __version__: str

__all__ = [
    "Engine",
    "InvalidArgumentError",
    "LookaheadConfig",
    "LookaheadError",
    "LookaheadOutput",
    "LookaheadWarning",
    "ModelChangedError",
    "NGramPool",
    "ParallelError",
    "RequestHandle",
    "Statistics",
    "StepRecord",
    "TokenEvent",
    "Trace",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "detach",
    "generate",
    "load_gguf",
]

_HOMES = {
    "Engine": "serving",
    "InvalidArgumentError": "errors",
    "LookaheadConfig": "config",
    "LookaheadError": "errors",
    "LookaheadOutput": "serving.output",
    "LookaheadWarning": "errors",
    "ModelChangedError": "errors",
    "NGramPool": "drafting",
    "ParallelError": "errors",
    "RequestHandle": "serving",
    "Statistics": "core.statistics",
    "StepRecord": "core.statistics",
    "TokenEvent": "serving",
    "Trace": "trace",
    "UnsupportedArgumentError": "errors",
    "UnsupportedModelError": "errors",
    "attach": "api.generation",
    "detach": "api.generation",
    "generate": "api.generation",
    "load_gguf": "backends.llama_cpp.model",
    "__version__": "version",
}

_MODULES = ("config", "demo", "errors", "parallel")
"""Modules of the public API, which need no import of their own."""


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first used: torch and transformers take seconds, and most need neither."""
    value: Any
    if name in _HOMES:
        value = getattr(import_module(f"lookahead.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"lookahead.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
