"""Loading and preparation of the model that a command names."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from lookahead.backends import loading
from lookahead.backends.loading import LoadedModel, check_device, is_out_of_memory, use_faster_type
from lookahead.backends.session import open_session
from lookahead.backends.transformers.miniature import quiet
from lookahead.cli.model_files import FoundModel
from lookahead.cli.settings import (
    BatchSettings,
    ChatSettings,
    CompareSettings,
    GenerateSettings,
    ModelSettings,
    ServeSettings,
    TextSettings,
    TraceSettings,
    WarmUpSettings,
)
from lookahead.cli.signals import raise_on_interrupt
from lookahead.cli.terminal import spinner
from lookahead.core.compiled import on_first_compilation
from lookahead.drafting.background import BACKGROUND, compile_loops
from lookahead.errors import InvalidArgumentError, LookaheadError, LookaheadWarning


def compile_drafting(notes: Console) -> None:
    """Compile the drafting loops before anything is timed; print a note unless they are in the cache."""
    with spinner(notes, "compiling"), on_first_compilation(lambda: notes.print("compiling the drafting loops (once)")):
        compile_loops()


def load_model(settings: ModelSettings, notes: Console) -> LoadedModel:
    """Load the model that the settings name, with a spinner on terminals."""
    device, source = check_device(settings.device), settings.local_model
    assert source is not None, "found before torch is imported"
    gguf = _gguf_options(source, settings)
    memory = memory_errors_explained(
        f"on {device} while loading the model", "--dtype bfloat16, a smaller model or another --device"
    )
    with spinner(notes, f"loading {settings.model or source.path.name}"), memory:
        try:
            loaded = loading.load_model(
                source.path,
                settings.dtype,
                device,
                trust_remote_code=settings.trust_remote_code,
                allow_pickle=settings.allow_pickle,
                **gguf,
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"--model {settings.model or source.path}: {error}") from error
    return replace(loaded, origin=source.origin)


def _gguf_options(source: FoundModel, settings: ModelSettings) -> dict[str, Any]:
    """Arguments of `load_gguf`; none for other models. Options that do not apply to the kind of model are refused.

    Raises:
        InvalidArgumentError: An option does not apply.
    """
    name = settings.model or source.path
    kind = "a GGUF model" if source.is_gguf else "a model of MLX" if source.is_mlx else "a transformers model"
    is_foreign = source.is_gguf or source.is_mlx
    if not isinstance(settings, TextSettings):
        if is_foreign:
            raise InvalidArgumentError(
                f"--model {name}: tune measures transformers models only; the step times of {kind} are learned during "
                "decoding"
            )
        return {}
    devices = (None, "cpu") if source.is_gguf else (None,)
    for option, is_set, applies, whose in (
        ("--trust-remote-code", settings.trust_remote_code, not is_foreign, "transformers"),
        ("--allow-pickle", settings.allow_pickle, not is_foreign, "transformers"),
        (f"--dtype {settings.dtype}", settings.dtype not in ("auto", "float32"), not is_foreign, "transformers"),
        (f"--device {settings.device}", settings.device not in devices, not is_foreign, "transformers"),
        (f"--gpu-layers {settings.gpu_layers}", settings.gpu_layers, source.is_gguf, "GGUF"),
        ("--fast-kv", settings.fast_kv, source.is_gguf, "GGUF"),
    ):
        if is_set and not applies:
            remedy = "use --gpu-layers" if source.is_gguf and option.startswith("--device") else "leave it out"
            raise InvalidArgumentError(
                f"{option} applies to {whose} models only, but --model {name} is {kind}; {remedy}"
            )
    return {"n_gpu_layers": settings.gpu_layers, "fast_kv": settings.fast_kv} if source.is_gguf else {}


def load_for_decoding(settings: TextSettings, notes: Console) -> LoadedModel:
    """Load and check the model, compile the drafting loops, and let Ctrl-C raise `KeyboardInterrupt` from here on.

    For commands without an `Engine`, the model is also prepared as on its first call.
    """
    waiting = CompareSettings, TraceSettings, WarmUpSettings
    waits = isinstance(settings, waiting) or not settings.config.compile_in_background
    if not waits:
        BACKGROUND.begin(settings.config, lambda: notes.print("compiling the drafting loops in the background (once)"))
    loaded = load_model(settings, notes)
    chooses = isinstance(settings, (ServeSettings, ChatSettings, GenerateSettings)) and settings.dtype == "auto"
    if chooses and not settings.config.invariant and (chosen := use_faster_type(loaded.model)) is not None:
        notes.print(chosen, style="dim")
    session = open_session(loaded.model)
    memory = memory_errors_explained(f"on {loaded.model.device} while preparing the model", "a smaller model")
    with memory, spinner(notes, "preparing the model"):
        session.check()
        if not isinstance(settings, (BatchSettings, ServeSettings)):
            session.prepare(settings.config)
    if waits:
        compile_drafting(notes)
    if not isinstance(settings, ServeSettings):  # the server handles signals itself
        raise_on_interrupt()
    return loaded


@contextmanager
def quiet_libraries(worded: Callable[[str], str] = str) -> Iterator[None]:
    """Hide warnings, logs and progress bars of other libraries.

    Warnings of this library are printed in one line on standard error, adapted to the command line by `worded`.
    """

    def say(message: Warning | str, *where: Any, **more: Any) -> None:
        print("warning:", " ".join(worded(str(message)).split()), file=sys.stderr)

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            warnings.simplefilter("default", LookaheadWarning)
            warnings.showwarning = say
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


class OutOfMemoryError(LookaheadError):
    """Raised if the device has too little memory for a command."""


@contextmanager
def memory_errors_explained(where: str, advice: str) -> Iterator[None]:
    """Turn out-of-memory errors of torch into an `OutOfMemoryError` with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        match = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        detail = f" (tried to allocate {match[1]})" if match else ""
        raise OutOfMemoryError(f"out of memory {where}{detail}: try {advice}") from error
