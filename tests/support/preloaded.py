"""Processes forked from one with all imports done, which would take each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

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


class Program:
    """A Python program in a forked process, with the interface of `subprocess.Popen`.

    Modules that are imported already do not read the environment again.

    Args:
        arguments: Arguments of the interpreter: the path of a script or `-m` and a module, and the program's arguments.
        streams: File descriptors for its standard input, output and error (0, 1 and 2); the caller closes its own.
        environment: Variables to set.
    """

    def __init__(
        self, arguments: Sequence[str], streams: Mapping[int, int], environment: Mapping[str, str] | None = None
    ) -> None:
        ours = [(number, _Descriptor(there)) for number, there in streams.items()]
        how = arguments, ours, dict(environment or {}), os.getcwd()
        self._process = preloaded().Process(target=_run, args=how, daemon=True)
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


class Command(Program):
    """A command of the library.

    Args:
        arguments: Name and arguments of the command.
        streams: See `Program`.
    """

    def __init__(self, arguments: Sequence[str], streams: Mapping[int, int]) -> None:
        super().__init__(["-m", "lookahead", *arguments], streams)


def run_program(*arguments: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end.

    Args:
        *arguments: See `Program`.
        given: Its standard input.
        **environment: Variables to set.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        code = Program(arguments, {number: file.fileno() for number, file in enumerate(files)}, environment).wait()
        for file in files[1:]:
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, files[1].read(), files[2].read())


class _Descriptor:
    """An open file that a new process inherits."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: Any) -> int:
    return int(descriptor.detach())


def _run(arguments: Sequence[str], streams: list[tuple[int, int]], environment: Mapping[str, str], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server may ignore the signal
    for number, opened in streams:
        os.dup2(opened, number)
        os.close(opened)
        name, mode = [("stdin", "r"), ("stdout", "w"), ("stderr", "w")][number]
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
