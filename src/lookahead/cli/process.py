"""Exit codes, library versions, and the ranks of `--parallel`."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from lookahead.cli import signals
from lookahead.cli.inputs import find_model, read_prompt
from lookahead.cli.rendering import Consoles
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError
from lookahead.version import __version__

if TYPE_CHECKING:
    from lookahead.cli.settings import DecodingSettings, GenerateSettings
    from lookahead.parallel import ParallelGroup


OK = 0
DIFFERENT = 1
"""Outputs differ, or prompts were not answered."""
ERROR = 2
BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of the output has closed it."""


def versions() -> dict[str, str]:
    """Versions of lookahead, torch, transformers and Python, for reports."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"lookahead": __version__, **libraries, "python": platform.python_version()}


def started_together() -> bool:
    """Whether this process is a rank, with environment variables from `torchrun` or `--parallel`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int, settings: GenerateSettings) -> int:
    """Check the settings, run the same command line on `count` ranks, and return the exit code."""
    if not hasattr(signal, "pthread_sigmask"):
        raise InvalidArgumentError(f"--parallel {count} is not supported on Windows; leave it out")
    from lookahead.parallel.launcher import run_ranks
    from lookahead.parallel.settings import check_memory

    check_memory(settings.config, count)
    model = find_model(settings, Consoles(no_color=settings.no_color).notes)  # downloaded once, not by each rank
    if model.is_gguf or model.is_mlx:
        raise InvalidArgumentError(
            f"--parallel {count} applies to transformers models only; leave it out for a GGUF file or a model of MLX"
        )
    if settings.device not in (None, "cpu"):
        from lookahead.backends.loading import check_device  # late, as it imports torch

        check_device(settings.device)
    text = read_prompt(settings)  # here, as ranks cannot share standard input
    return run_ranks(count, "lookahead.cli:main", settings.argv, text.encode())


def scaled(config: LookaheadConfig, count: int | None) -> LookaheadConfig:
    """Scale the configuration from one device to `count`; by default to the number of ranks."""
    if count is None and not started_together():
        return config
    from lookahead.parallel.settings import environment_number, scale_config

    ranks = environment_number("WORLD_SIZE", 1) if count is None else count
    return config if ranks == 1 else scale_config(config, ranks)


@contextlib.contextmanager
def joined_ranks() -> Iterator[ParallelGroup | None]:
    """Join the group of ranks, `None` without one. Output of all ranks but 0 is discarded."""
    if not started_together():
        yield None
        return
    from lookahead.parallel import join

    with contextlib.ExitStack() as stack:
        group = stack.enter_context(join())
        if group.rank:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield group


def stopped_by_parent(group: ParallelGroup | None) -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM raise `KeyboardInterrupt` on rank 0: the launcher turns Ctrl-C into SIGTERM."""
    if group is None or group.rank:
        return contextlib.nullcontext()
    return signals.handling(signal.SIGTERM, signal.default_int_handler)


def on_own_device(settings: DecodingSettings) -> DecodingSettings:
    """Settings with this rank's own GPU, if there are GPUs and `--device` was not given."""
    import torch

    if settings.device is None and torch.cuda.is_available():
        from lookahead.parallel.settings import environment_number

        device = environment_number("LOCAL_RANK", 0) % torch.cuda.device_count()
        return replace(settings, device=f"cuda:{device}")
    return settings
