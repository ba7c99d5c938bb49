"""Processes forked from one with all imports done, which would take each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from typing import Any

from lookahead.cli import main

_MODULES = [
    *("transformers.models.llama.modeling_llama", "lookahead.api.generation", "lookahead.parallel"),
    *("lookahead.api.call", "transformers.generation.utils", "torch._dynamo", "hypothesis"),
]
_OF_SERVERS = ["lookahead.cli.serve", "lookahead.server.process"]


def preloaded() -> ForkServerContext:
    """Return the fork server, one per test process, with the modules of the first call imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES, *(_OF_SERVERS if find_spec("fastapi") else [])])
    return context


class Command:
    """A command of the library in a forked process, with the interface of `subprocess.Popen`.

    Args:
        arguments: Name and arguments of the command.
        streams: File descriptors for its standard input, output and error (0, 1 and 2); the caller closes its own.
    """

    def __init__(self, arguments: list[str], streams: Mapping[int, int]) -> None:
        ours = [(number, _Descriptor(there)) for number, there in streams.items()]
        self._process = preloaded().Process(target=_run, args=(arguments, ours), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: The process has not ended.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("lookahead", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


class _Descriptor:
    """An open file that a new process inherits."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: Any) -> int:
    return int(descriptor.detach())


def _run(arguments: list[str], streams: list[tuple[int, int]]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server may ignore the signal
    for number, opened in streams:
        os.dup2(opened, number)
        os.close(opened)
        name, mode = [("stdin", "r"), ("stdout", "w"), ("stderr", "w")][number]
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.exit(main(arguments))
