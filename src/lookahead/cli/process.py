"""This process: exit codes, library versions, and `--parallel`, where it is one of several ranks."""

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
"""`compare`: the outputs are not identical."""
ERROR = 2
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output has gone."""


def versions() -> dict[str, str]:
    """What a report of results has to name so that others can repeat them."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"lookahead": __version__, **libraries, "python": platform.python_version()}


def started_together() -> bool:
    """Whether this process is a rank already: `torchrun` or `--parallel` has set its environment variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int, settings: GenerateSettings) -> int:
    """Run the same command line as `count` ranks, after what can be refused without them; the exit code."""
    if not hasattr(signal, "pthread_sigmask"):
        raise InvalidArgumentError(f"--parallel {count} is not supported on Windows; leave it out")
    from lookahead.parallel import check_memory
    from lookahead.parallel.launcher import run_ranks

    check_memory(settings.config, count)
    if find_model(settings, Consoles(no_color=settings.no_color).notes).is_gguf:  # downloaded once, not by each rank
        raise InvalidArgumentError(f"--parallel {count} is about models of transformers; leave it out for a GGUF file")
    if settings.device not in (None, "cpu"):
        from lookahead.backends.loading import check_device  # which takes torch to know

        check_device(settings.device)
    text = read_prompt(settings)  # once, as there is one standard input
    return run_ranks(count, "lookahead.cli:main", settings.argv, text.encode())


def scaled(config: LookaheadConfig, count: int | None) -> LookaheadConfig:
    """The configuration of one device for `count` of them, or for as many as this process was started with."""
    if count is None and not started_together():
        return config
    from lookahead.parallel import environment_number, scale_config

    ranks = environment_number("WORLD_SIZE", 1) if count is None else count
    return config if ranks == 1 else scale_config(config, ranks)


@contextlib.contextmanager
def joined_ranks() -> Iterator[ParallelGroup | None]:
    """The ranks that this process was started with, if it was; all but rank 0 are silent."""
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
    """Let SIGTERM raise `KeyboardInterrupt` on rank 0: so whoever started it passes Ctrl-C on."""
    if group is None or group.rank:
        return contextlib.nullcontext()
    return signals.handling(signal.SIGTERM, signal.default_int_handler)


def on_own_device(settings: DecodingSettings) -> DecodingSettings:
    """Settings with this rank's own GPU, where there are GPUs and none was chosen."""
    import torch

    if settings.device is None and torch.cuda.is_available():
        from lookahead.parallel import environment_number

        device = environment_number("LOCAL_RANK", 0) % torch.cuda.device_count()
        return replace(settings, device=f"cuda:{device}")
    return settings
