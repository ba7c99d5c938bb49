"""llama-cpp-python: loaded when it is first needed, and quiet."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

from lookahead.errors import InvalidArgumentError

_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_log_lock = Lock()


@cache
def binding() -> Any:
    """The module `llama_cpp`.

    Raises:
        InvalidArgumentError: It is not installed, or does not load.
    """
    try:
        import llama_cpp
    except Exception as error:  # without its library it raises what ctypes raises
        raise InvalidArgumentError(
            f"GGUF models are run by llama-cpp-python, which cannot be loaded here ({type(error).__name__}: {error}); "
            "install it: pip install 'lookahead-decoding[gguf]'"
        ) from error
    log = logging.getLogger("llama-cpp-python")
    if log.level == logging.NOTSET:  # it would print all that llama.cpp says of itself
        log.setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    return llama_cpp


@contextmanager
def error_lines() -> Iterator[list[str]]:
    """Collect what llama.cpp has to say of errors meanwhile, instead of printing it."""
    llama_cpp = binding()
    lines: list[str] = []

    def keep(level: int, text: bytes, _: Any) -> None:
        if level == _ERROR:
            lines.append(text.decode(errors="replace").strip())

    callback = llama_cpp.llama_log_callback(keep)
    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    with _log_lock:
        llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
        llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            llama_cpp.llama_log_set(before, data)
