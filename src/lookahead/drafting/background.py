"""The loops of drafting, compiled by a process in the background while texts are decoded without drafts.

Drafts change no text, so none has to wait for a compiler. The folder of kept loops is where the two meet: the other
process compiles into it, and this one reads the loops when it finds the folder complete. Where that comes to nothing,
because there is no such folder, the disk is full or the other process was killed, texts go on without drafts for a
while, and then this process compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from lookahead.config import LookaheadConfig
from lookahead.core.compiled import LOOPS, are_kept, loops_folder
from lookahead.core.protocols import Send, StepBudget
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.warm_up import compile_loops

_PATIENCE = 256
"""Steps without drafts before this process compiles by itself, if no other one does."""

_LONGEST = 600.0
"""Seconds to wait for a process that compiles the same."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from lookahead.drafting.background import compile_once; "
    "sys.exit(compile_once())"
)


class BackgroundCompilation:
    """The compilation of the loops of drafting by another process; threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._other: subprocess.Popen[bytes] | None = None
        self._left = _PATIENCE

    def begin(self, config: LookaheadConfig, note: Callable[[], None] = lambda: None) -> None:
        """Have the loops compiled, if any are to be: by another process, or at once if `config` has calls wait.

        Args:
            config: How a call drafts.
            note: Called if the call goes on without drafts meanwhile.
        """
        if not config.compile_in_background:
            self._wait()
        elif config.preset != "autoregressive" and not compile_loops.cache_info().currsize:
            with self._lock:
                if not LOOPS.awaited and not are_kept():
                    self._other, LOOPS.awaited = _start(), True
            if LOOPS.awaited:
                note()

    def _wait(self) -> None:
        with self._lock:
            if LOOPS.awaited:
                if self._other is not None:
                    self._other.wait()
                self._take_up()

    def are_there(self) -> bool:
        """Whether the loops can be used; asked when a step begins. Reads them once they are there."""
        if not LOOPS.awaited:
            return True
        if not self._lock.acquire(blocking=False):  # another thread reads them
            return False
        try:
            if not are_kept():
                if self._other is not None and self._other.poll() is None:
                    return False
                self._left -= 1
                if self._left > 0:
                    return False
            self._take_up()
        finally:
            self._lock.release()
        return True

    def _take_up(self) -> None:
        LOOPS.awaited = False  # before, as some loops are not called while they are awaited
        compile_loops()


BACKGROUND = BackgroundCompilation()


def _start() -> subprocess.Popen[bytes] | None:
    """A process that compiles, and may outlive this one; `None` where it cannot be started or keep a loop."""
    program = Path(sys.executable or "")
    if loops_folder() is None or getattr(sys, "frozen", False) or "python" not in program.name.lower():
        return None  # it may be a program that Python is built into, which does not run other programs
    flags = ("BELOW_NORMAL_PRIORITY_CLASS", "CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW")
    try:
        process = subprocess.Popen(
            [program, "-c", _PROGRAM, *map(str, sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=sum(getattr(subprocess, flag, 0) for flag in flags),
        )
        Thread(target=process.wait, daemon=True).start()  # so that nothing is left of it in a list of processes
    except (OSError, ValueError, RuntimeError):  # too many processes, too little memory, or a path with a zero byte
        return None
    return process


def compile_once() -> int:
    """Compile the loops, unless a process that has begun before does; the exit code, 1 if they could not be kept."""
    with suppress(AttributeError, OSError):  # there are no priorities, or none that is lower
        os.nice(5)
    folder = loops_folder()
    if folder is None:
        return 1
    lock = FileLock(folder / "compiling.lock", timeout=_LONGEST)
    with suppress(OSError, Timeout, NotImplementedError):  # there are no locks: both compile
        lock.acquire()
    try:
        if not are_kept():
            compile_loops()
    finally:
        lock.release()
    return 0 if are_kept() else 1


class WaitingBudget:
    """A `StepBudget` that backs off as long as the loops are awaited.

    Args:
        budget: The budget that decides from then on.
    """

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._waits = True

    @property
    def backs_off(self) -> bool:
        """See `StepBudget`."""
        return self._waits or self._budget.backs_off

    @property
    def least(self) -> float:
        """See `StepBudget`."""
        return self._budget.least

    @property
    def most(self) -> int:
        """See `StepBudget`."""
        return self._budget.most

    def begin(self, teaches: bool = True) -> None:
        """See `StepBudget`."""
        self._waits = LOOPS.awaited
        if not self._waits:
            self._budget.begin(teaches)

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`."""
        self._budget.offer(likely, send, pending)


def once_compiled(drafter: AutoDrafter) -> AutoDrafter:
    """The same drafter, which begins to draft when its loops are there."""
    if LOOPS.awaited:
        drafter.budget = WaitingBudget(drafter.budget)
    else:
        compile_loops()  # now: a step that compiled would say nothing of what steps cost
    return drafter
