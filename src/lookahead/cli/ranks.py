"""`--parallel`: this process as one of several ranks, or as the one that starts them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from lookahead.cli.model_folder import check_model_path, is_gguf
from lookahead.cli.prompt import read_prompt
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    from lookahead.cli.settings import GenerateSettings
    from lookahead.parallel import ParallelGroup


def started_together() -> bool:
    """Whether this process is a rank already: `torchrun` or `--parallel` has set its environment variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int, settings: GenerateSettings) -> int:
    """Run the same command line as `count` ranks, after what can be refused without them; the exit code."""
    from lookahead.parallel.launcher import run_ranks
    from lookahead.parallel.scaling import check_memory

    check_memory(settings.config, count)
    if settings.model is not None:
        check_model_path(settings.model)
    if is_gguf(settings.model):
        raise InvalidArgumentError(f"--parallel {count} is about models of transformers; leave it out for a GGUF file")
    if settings.device not in (None, "cpu"):
        from lookahead.cli.loading import check_device  # which takes torch to know

        check_device(settings.device)
    text = read_prompt(settings)  # once, as there is one standard input
    return run_ranks(count, "lookahead.cli:main", settings.argv, text.encode())


def scaled(config: LookaheadConfig, count: int | None) -> LookaheadConfig:
    """The configuration of one device for `count` of them, or for as many as this process was started with."""
    ranks = count or (int(os.environ["WORLD_SIZE"]) if started_together() else 1)
    if ranks == 1:
        return config
    from lookahead.parallel import scale_config

    return scale_config(config, ranks)


@contextmanager
def joined_ranks() -> Iterator[ParallelGroup | None]:
    """The ranks that this process was started with, if it was; all but rank 0 are silent."""
    if not started_together():
        yield None
        return
    from lookahead.parallel import join

    with ExitStack() as stack:
        group = stack.enter_context(join())
        if group.rank:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield group


@contextmanager
def stopped_by_parent(group: ParallelGroup | None) -> Iterator[None]:
    """Let SIGTERM raise `KeyboardInterrupt` on rank 0: so whoever started it passes Ctrl-C on."""
    if group is None or group.rank or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def on_own_device(settings: GenerateSettings) -> GenerateSettings:
    """Settings with this rank's own GPU, where there are GPUs and none was chosen."""
    import torch

    if settings.device is None and torch.cuda.is_available():
        own = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return replace(settings, device=f"cuda:{own}")
    return settings
