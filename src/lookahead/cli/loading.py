"""The model that a command names, loaded quietly and made ready."""

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
from lookahead.backends.loading import LoadedModel, check_device, is_out_of_memory
from lookahead.backends.session import open_session
from lookahead.backends.transformers.miniature import quiet
from lookahead.cli import signals
from lookahead.cli.inputs import FoundModel
from lookahead.cli.rendering import spinner
from lookahead.cli.settings import (
    BatchSettings,
    CompareSettings,
    ModelSettings,
    ServeSettings,
    TextSettings,
    TraceSettings,
    WarmUpSettings,
)
from lookahead.core.compiled import on_first_compilation
from lookahead.drafting.background import BACKGROUND
from lookahead.drafting.warm_up import compile_loops
from lookahead.errors import InvalidArgumentError, LookaheadError, LookaheadWarning


def compile_drafting(notes: Console) -> None:
    """Have the drafting loops compiled before anything is timed; says so where none are kept from earlier."""
    with spinner(notes, "compiling"), on_first_compilation(lambda: notes.print("compiling the drafting loops (once)")):
        compile_loops()


def load_model(settings: ModelSettings, notes: Console) -> LoadedModel:
    """Load the model that the settings name; a spinner shows that something happens."""
    device, found = check_device(settings.device), settings.found
    assert found is not None, "found before torch is imported"
    gguf = _gguf_options(found, settings)
    memory = memory_errors_explained(
        f"on {device} while loading the model", "--dtype bfloat16, a smaller model or another --device"
    )
    with spinner(notes, f"loading {settings.model or found.path.name}"), memory:
        try:
            loaded = loading.load_model(
                found.path,
                settings.dtype,
                device,
                trust_remote_code=settings.trust_remote_code,
                allow_pickle=settings.allow_pickle,
                **gguf,
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"--model {settings.model or found.path}: {error}") from error
    return replace(loaded, origin=found.origin)


def _gguf_options(found: FoundModel, settings: ModelSettings) -> dict[str, Any]:
    """Arguments of `load_gguf`.

    Raises:
        InvalidArgumentError: There are options that are about models of the other kind.
    """
    name = settings.model or found.path
    if not isinstance(settings, TextSettings):
        if found.is_gguf:
            raise InvalidArgumentError(
                f"--model {name}: tune measures models of transformers; what a step of a GGUF model costs is learned "
                "as it runs"
            )
        return {}
    if found.is_gguf:
        if settings.trust_remote_code or settings.allow_pickle:
            option = "--trust-remote-code" if settings.trust_remote_code else "--allow-pickle"
            raise InvalidArgumentError(f"{option} is about models of transformers; a GGUF file holds no code")
        if settings.dtype not in ("auto", "float32"):
            raise InvalidArgumentError(
                f"--dtype {settings.dtype} is about models of transformers; the weights of a GGUF file have types of "
                "their own"
            )
        if settings.device not in (None, "cpu"):
            raise InvalidArgumentError(
                f"--device {settings.device} is about models of transformers; --gpu-layers puts layers of a GGUF on a "
                "GPU"
            )
        return {"n_gpu_layers": settings.gpu_layers, "fast_kv": settings.fast_kv}
    for option, given in (("--gpu-layers", settings.gpu_layers), ("--fast-kv", settings.fast_kv)):
        if given:
            value = "" if given is True else f" {given}"
            raise InvalidArgumentError(
                f"{option}{value} is about GGUF models, but --model {name} is none; leave {option} out"
            )
    return {}


def load_for_decoding(settings: TextSettings, notes: Console) -> LoadedModel:
    """Load and check the model, compile what drafts for it, and let Ctrl-C raise: from here on there is something to
    show. Where no `Engine` is to be made, what runs the model is made as well, as its first call would."""
    waiting = CompareSettings, TraceSettings, WarmUpSettings
    waits = isinstance(settings, waiting) or not settings.config.compile_in_background
    if not waits:
        BACKGROUND.begin(settings.config, lambda: notes.print("compiling the drafting loops in the background (once)"))
    loaded = load_model(settings, notes)
    session = open_session(loaded.model)
    memory = memory_errors_explained(f"on {loaded.model.device} while preparing the model", "a smaller model")
    with memory, spinner(notes, "preparing the model"):
        session.check()
        if not isinstance(settings, (BatchSettings, ServeSettings)):
            session.prepare(settings.config)
    if waits:
        compile_drafting(notes)
    if not isinstance(settings, ServeSettings):  # a server finishes what it has by itself
        signals.raise_on_interrupt()
    return loaded


@contextmanager
def quiet_libraries(worded: Callable[[str], str] = str) -> Iterator[None]:
    """Keep warnings, logs and progress bars of the libraries below off the terminal for a while.

    What this library itself warns of is said in one line on standard error, `worded` for whoever gave a command.
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
    """The device has no memory left for what was asked."""


@contextmanager
def memory_errors_explained(where: str, advice: str) -> Iterator[None]:
    """Turn running out of memory into an `OutOfMemoryError` that says what to try."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        detail = f" (tried to allocate {asked[1]})" if asked else ""
        raise OutOfMemoryError(f"out of memory {where}{detail}: try {advice}") from error
