"""Start the ranks of one machine and wait for them. No rank outlives this process, however it ends.

This module does not import torch, so that it answers signals at once. It is also the program of the ranks: `main` runs
one rank, which ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from tempfile import TemporaryFile
from typing import IO, Any

from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.errors import UnsupportedArgumentError
from lookahead.values import whole_number

GRACE = 3.0
"""Seconds that rank 0 has to exit by itself, with a message, after another rank has exited with an error."""

INTERRUPT_GRACE = 1.0
"""Seconds that rank 0 has to print the generated text, after Ctrl-C."""

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask to end."""

_POLL = 0.05
_SHOW_CURSOR = "\x1b[?25h"


def started_together() -> bool:
    """Whether this process is a rank, with environment variables from `torchrun` or `--parallel`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment_number(name: str, minimum: int, maximum: int | None = None) -> int:
    """Number in an environment variable that `torchrun` sets; 0 if it is missing.

    Raises:
        InvalidArgumentError: The variable is no whole number, or is out of range.
    """
    text = os.environ.get(name, "0")
    number = int(text) if text.isdecimal() else text
    return whole_number(f"environment variable {name}", number, minimum, maximum, "start the processes with torchrun")


def check_memory(config: LookaheadConfig, ranks: int) -> None:
    """Refuse a memory file, as several ranks cannot keep it equal."""
    if config.memory not in MEMORY_SCOPES and ranks > 1:
        raise UnsupportedArgumentError(
            f'memory={config.memory!r} is not supported on {ranks} ranks: drafts must agree; use memory="request"'
        )


@dataclass(frozen=True)
class _Rank:
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None  # its standard error; `None` if shared with this process

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; `None` while it runs."""
        return self.process.poll()


def run_ranks(count: int, entry: str, arguments: Sequence[str], stdin: bytes | None = None) -> int:
    """Run `entry` in `count` processes, each with the environment variables that `torchrun` sets, until all have ended.

    Rank 0 has this process's standard output and error. If another rank fails, this process prints one line, unless
    rank 0 has printed the error. SIGTERM and SIGHUP end all ranks at once. After SIGINT, rank 0 gets SIGTERM and a
    moment to print its text; then all ranks end. Ranks never see SIGINT, which a terminal would send to all of them.

    Args:
        entry: `module:function`; the function takes the arguments and returns an exit code.
        stdin: Standard input of every rank; empty by default.

    Returns:
        The first exit code other than 0, in rank order, else 0; 128 + the signal number if a signal ended a rank or
        this process.
    """
    with ExitStack() as stack:
        caught = stack.enter_context(_caught_signals())
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        # Ranks read this pipe; it ends when this process closes it or dies.
        sentinel, write_end = os.pipe()
        stack.callback(os.close, write_end)
        with open(sentinel, "rb"), socket.create_server(("127.0.0.1", 0)) as listener, _interrupts_blocked():
            for rank in range(count):
                ranks.append(_start(rank, count, listener, sentinel, [entry, *arguments], stdin or b"", stack))
        return _wait(ranks, caught)


def _start(
    rank: int, count: int, listener: socket.socket, sentinel: int, call: Sequence[str], stdin: bytes, stack: ExitStack
) -> _Rank:
    # Rank 0 gets an open socket for the store of the run: a port that was free may be taken a moment later.
    store = listener.fileno() if rank == 0 else -1
    command = [sys.executable, "-m", "lookahead.parallel.launcher", str(os.getpid()), str(sentinel), str(store), *call]
    errors = None if rank == 0 else stack.enter_context(TemporaryFile())  # noqa: SIM115  # read when the rank has ended
    with TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=errors,
            env=_environment(rank, count, listener.getsockname()[1]),
            pass_fds=[sentinel] if rank else [sentinel, store],
        )
    return _Rank(process, errors)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        # torch would print a stack trace for each connection that breaks when ranks are stopped.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # `main` creates the store, instead of torch.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT, so that processes started meanwhile never see Ctrl-C, not even before their first line runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(ranks: Sequence[_Rank], caught: Sequence[int]) -> int:
    while not caught:
        codes = [rank.code for rank in ranks]
        if any(codes):
            time.sleep(_POLL)  # a signal to the whole process group may have reached that rank first
            return _interrupted(ranks, caught) if caught else _failed(ranks, caught)
        if None not in codes:
            return 0
        time.sleep(_POLL)
    return _interrupted(ranks, caught)


def _interrupted(ranks: Sequence[_Rank], caught: Sequence[int]) -> int:
    """Return the exit code after a signal; a second signal ends the wait for rank 0."""
    if caught[0] == signal.SIGINT:
        ranks[0].process.terminate()
        _wait_for(ranks[0], INTERRUPT_GRACE, caught[1:])
    return 128 + caught[0]


def _failed(ranks: Sequence[_Rank], caught: Sequence[int]) -> int:
    """Print the first failed rank, unless rank 0 prints its own error, and return the exit code."""
    number, first = next((number, rank) for number, rank in enumerate(ranks) if rank.code)
    if (first.code or 0) > 0:
        _wait_for(ranks[0], GRACE, caught)
    if caught:
        return _interrupted(ranks, caught)
    if (ranks[0].code or 0) > 0:
        return ranks[0].code or 0  # it has printed its error
    print(f"error: rank {number} {_reason(first)}; the others were stopped", file=sys.stderr)
    code = first.code or 0
    return 128 - code if code < 0 else code


def _wait_for(rank: _Rank, seconds: float, caught: Sequence[int]) -> None:
    end = time.monotonic() + seconds
    while rank.code is None and not caught and time.monotonic() < end:
        time.sleep(_POLL)


def _reason(rank: _Rank) -> str:
    code = rank.code or 0
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    assert rank.errors is not None  # rank 0 prints its own error
    rank.errors.seek(0)
    lines = [line.strip() for line in rank.errors.read().decode(errors="replace").splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    return f"failed: {reasons[-1].rstrip('.')}" if reasons else f"ended with exit code {code}"


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.code is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
    if ranks and ranks[0].process.returncode < 0 and sys.stderr.isatty():
        print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)  # a spinner hides it


_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run `module:function` with the arguments after it, and return its exit code.

    Three numbers precede it on the command line: the id of the parent process, the pipe to it, and the listening socket
    of the store (-1 except on rank 0).
    """
    parent, pipe, listener = map(int, sys.argv[1:4])
    _end_with(parent, pipe)
    module, function = sys.argv[4].split(":")
    store = None if listener < 0 else _open_store(listener)
    code: int = getattr(import_module(module), function)(sys.argv[5:])
    del store  # kept until here for all ranks
    return code


def _end_with(parent: int, pipe: int) -> None:
    """End this process as soon as `parent` ends, which holds the other end of `pipe`."""
    threading.Thread(target=end_after, args=(pipe,), name="lookahead-parent", daemon=True).start()
    if sys.platform == "linux":
        # The kernel acts at once; the thread waits for Python's lock, which loading a library may hold for long.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


def end_after(pipe: int) -> None:
    """Wait until the other end of `pipe` is closed, and end this process at once."""
    os.read(pipe, 1)  # nothing is ever written to it
    os._exit(1)


def _open_store(listener: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its own list

    return TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=listener,
    )


if __name__ == "__main__":
    sys.exit(main())
