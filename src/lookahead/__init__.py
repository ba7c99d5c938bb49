"""Lookahead decoding: the same text from a causal language model, in fewer and fuller steps."""

from __future__ import annotations

import sys
from importlib import import_module

if "t" in getattr(sys, "abiflags", ""):  # a build without the GIL; numba has releases for some of them only
    from importlib.util import find_spec

    if find_spec("numba") is None:
        raise ImportError(
            "lookahead needs numba, which is not installed and has no release for some free-threaded builds of Python; "
            "use a build with the GIL, such as python3.13, or python3.14t with numba"
        )

TYPE_CHECKING = False  # type checkers read it as true; importing `typing` would delay our handler of Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from lookahead.api.generation import attach, detach, forget, generate
    from lookahead.backends.llama_cpp.model import load_gguf
    from lookahead.backends.mlx.model import load_mlx
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
    "forget",
    "generate",
    "load_gguf",
    "load_mlx",
]

_HOMES = {
    **dict.fromkeys(("attach", "detach", "forget", "generate"), "api.generation"),
    **dict.fromkeys(("Statistics", "StepRecord"), "core.statistics"),
    **dict.fromkeys(("Engine", "RequestHandle", "TokenEvent"), "serving"),
    "LookaheadConfig": "config",
    "LookaheadOutput": "serving.output",
    "NGramPool": "drafting",
    "Trace": "trace",
    "load_gguf": "backends.llama_cpp.model",
    "load_mlx": "backends.mlx.model",
    "__version__": "version",
}
"""Module of each public name; names of errors are missing and come from `errors`."""

_MODULES = ("config", "demo", "errors", "parallel")
"""Modules of the public API, imported on first use as well."""


def __getattr__(name: str) -> Any:
    """Import names on first use: torch and transformers take seconds to import, and most names need neither."""
    value: Any
    if name in __all__:
        value = getattr(import_module(f"lookahead.{_HOMES.get(name, 'errors')}"), name)
    elif name in _MODULES:
        value = import_module(f"lookahead.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
