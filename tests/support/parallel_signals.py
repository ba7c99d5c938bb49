"""Signal the parent process of ranks: all ranks must end, and none may print its stack."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PROMPT = "def add(a, b):"
GENERATE = ["-m", "lookahead", "generate", PROMPT, "--preset", "paper", "--parallel", "2", "-n", "900"]
"""Far more tokens than are generated before any signal."""
GENERATE += ["--dtype", "auto"]  # weights in the type of their file stay mapped, so that `reach` sees them

PATIENCE = 120.0
"""Limit in seconds for the end of ranks; far more than they should need."""

NOISE = ("Traceback", "frame #", "Exception", "Error")
"""Words that must not be printed after Ctrl-C."""


@dataclass
class Processes:
    """A parent process of ranks, with its output.

    Attributes:
        parent: The process, which leads its own process group.
        ranks: Process ids of its ranks.
    """

    parent: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    ranks: list[int] = field(default_factory=list)

    def printed(self) -> str:
        """Standard output so far."""
        return _content(self.out)

    def complaints(self) -> str:
        """Standard error so far."""
        return _content(self.err)

    def send(self, number: int, to_group: bool = False) -> float:
        """Signal the parent, or all processes like a terminal; return the seconds until all have ended."""
        begun = time.monotonic()
        if to_group:
            os.killpg(self.parent.pid, number)
        else:
            self.parent.send_signal(number)
        self.parent.wait(PATIENCE)
        wait_until(lambda: not alive(self.ranks), f"ranks {self.ranks} to end")
        return time.monotonic() - begun

    def close(self) -> None:
        """Kill all processes and close the files."""
        for pid in [self.parent.pid, *self.ranks]:
            if pid in alive([pid]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.parent.wait()
        self.out.close()
        self.err.close()


def start(arguments: list[str], ranks: int = 2) -> Processes:
    """Start a Python process, and wait until it has started its ranks."""
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # closed by `Processes`
    # Children inherit ignored signals, which shells set for background jobs.
    unignored = (
        "import os, signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (1, 2, 15)]; "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", unignored, sys.executable, *arguments]
    parent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
    processes = Processes(parent, out, err)

    def started() -> bool:
        processes.ranks = [pid for pid, parent_pid, _ in _table() if parent_pid == parent.pid]
        return len(processes.ranks) == ranks

    try:
        wait_until(started, "ranks to start")
    except BaseException:
        processes.close()
        raise
    return processes


def reach(processes: Processes, phase: str) -> None:
    """Wait until the ranks reach a phase of `PHASES`."""
    if phase == "starting":
        return
    rank_0, rank_1 = sorted(processes.ranks)
    if phase == "importing":
        wait_until(lambda: "libtorch_cpu" in _mapped(rank_1), "a rank to load torch")
    elif phase == "joining":
        wait_until(lambda: "libtorch_cpu" in _mapped(rank_1), "rank 1 to load torch")
        os.kill(rank_1, signal.SIGSTOP)
        wait_until(lambda: "_multiarray_umath" in _mapped(rank_0), "rank 0 to load torch")
        time.sleep(8)
    elif phase == "loading":
        wait_until(lambda: ".safetensors" in _mapped(rank_0), "rank 0 to load the model")
    else:
        wait_until(lambda: processes.printed() != "", "the first tokens")
        if phase == "waiting":
            os.kill(rank_1, signal.SIGSTOP)
            time.sleep(1.5)


PHASES = ("starting", "importing", "joining", "loading", "generating", "waiting")
"""Ranks have started; load torch; wait in `init_process_group` for a stopped rank; load the model; generate; wait in
an exchange for a stopped rank."""

SIGNALS = {
    "SIGTERM": (signal.SIGTERM, False, 143),
    "SIGINT": (signal.SIGINT, False, 130),
    "SIGHUP": (signal.SIGHUP, False, 129),
    "SIGKILL": (signal.SIGKILL, False, -9),
    "Ctrl-C": (signal.SIGINT, True, 130),
}
"""Signal, whether the whole process group gets it, and the expected exit code."""


def signal_once(name: str, phase: str) -> tuple[float, list[str]]:
    """Send a signal in a phase; return the seconds until the last process ended, and the problems."""
    number, to_group, code = SIGNALS[name]
    processes = start(GENERATE)
    try:
        reach(processes, phase)
        seconds = processes.send(number, to_group)
        problems = complaints(processes)
        if processes.parent.returncode != code:
            problems.append(f"exit code {processes.parent.returncode}, not {code}")
        return seconds, problems
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        return PATIENCE, [str(error)]
    finally:
        processes.close()


def complaints(processes: Processes) -> list[str]:
    """Return unwanted output: more than one line, or a stack."""
    text = processes.complaints()
    loud = len(text.strip().splitlines()) > 1 or any(noise in text for noise in NOISE)
    return [f"printed: {text}"] if loud else []


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 4 * PATIENCE) -> None:
    """Wait for a condition, or raise `TimeoutError`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {what} for {seconds} s")
        time.sleep(0.01)


def alive(pids: list[int]) -> list[int]:
    """Return the processes that have not ended; zombies count as ended."""
    return [pid for pid, _, state in _table() if pid in pids and not state.startswith("Z")]


def _table() -> list[tuple[int, int, str]]:
    """Return id, parent and state of every process."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    return [(int(pid), int(parent), state) for pid, parent, state in map(str.split, lines.splitlines())]


def _mapped(pid: int) -> str:
    """Return the mapped files of a process; empty on systems other than Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def _content(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return re.sub(r"\x1b\[[\d;?]*\w", "", os.pread(file.fileno(), size, 0).decode(errors="replace"))
