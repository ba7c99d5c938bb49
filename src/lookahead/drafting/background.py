"""Compilation of the loops for drafting: here, or by a process while texts are decoded without drafts.

Drafts change no text, so no text has to wait for a compiler. The two processes meet in the cache folder of loops: the
other process compiles into it, and this one reads the loops once the folder is complete. Without such a folder, or if
the disk is full or the other process was killed, this process compiles after a number of steps without drafts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from lookahead.config import LookaheadConfig
from lookahead.core.compiled import LOOPS, are_kept, loops_folder, note_all_kept, uncollected
from lookahead.core.forest import Forest
from lookahead.core.likeliest import BLOCK, list_likeliest, list_likeliest_bits
from lookahead.core.pace import Pace
from lookahead.core.page_inputs import write_inputs
from lookahead.core.protocols import StepBudget
from lookahead.core.ranking import UNRANKED
from lookahead.core.results import StepResult
from lookahead.core.roots import Roots
from lookahead.core.step_costs import StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.core.tree_masks import MaskedTrees, dense_masks, packed_masks, packed_width
from lookahead.core.walk import compile_walk
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter

_PATIENCE = 256
"""Steps without drafts before this process compiles, if no other process does."""

_LONGEST = 600.0
"""Maximum time to wait for another process that compiles the same loops, in seconds."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from lookahead.drafting.background import compile_once; "
    "sys.exit(compile_once())"
)


@cache
def compile_loops() -> None:
    """Run each compiled loop of `preset="auto"` once, on arrays of the types used in decoding.

    Takes seconds if numba's cache is empty. Later calls return at once. Drafts then wait for no other process.
    """
    LOOPS.awaited = False  # first, because some loops are not called while they are awaited
    room = np.empty(1, dtype=np.float32), np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float32)
    listed = np.empty((1, 1), dtype=np.int64), np.empty((1, 1), dtype=np.float32)
    # numba makes many objects, and each garbage collection visits all of torch's objects: a fifth of the time.
    with uncollected():
        list_likeliest(np.zeros((1, BLOCK), dtype=np.float32), *room, *listed)
        list_likeliest_bits(np.zeros((1, BLOCK), dtype=np.int16), np.empty(BLOCK, dtype=np.float32), *room, *listed)
        pace = Pace(StepCosts())
        pace.choose(np.ones(1), resends=True)
        pace.book(StepTime(nodes=2, context=1, seconds=1.0, tokens=2, rows=1, drafted=True))
        _draft()
    note_all_kept()


def _draft() -> None:
    """Run one step, followed by a forced token."""
    drafter = AutoDrafter(DraftMemory(16, 2, 4), 8)
    drafter.start([0, 1, 2])
    tree = TokenTree([2])
    drafter.propose(tree)
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    forest = Forest.of_rows([None], [2], (zero, one, zero, zero))
    tree = forest[0]
    compile_walk(forest)
    tokens, positions, columns, starts, table = np.zeros((5, 1, 4), dtype=np.int32)
    buffers = tokens[0], positions[0], columns[0], starts[0], table
    trees = forest.firsts, forest.rows_of_slots, forest.slot_tokens, forest.depths
    write_inputs(0, trees, (zero, zero), (table, 64, False), buffers)
    masked = MaskedTrees(forest.firsts, forest.parent_slots, forest.roots, forest.depths)
    packed_masks(masked, None, None, packed_width(len(tree)))
    dense_masks(masked, forest.roots, (None, None), -1.0)
    top_ids = np.tile(np.arange(drafter.top_k), (len(tree), 1))  # [nodes, top_k] int64
    top_probabilities = np.full(top_ids.shape, 0.1, dtype=np.float32)
    drafter.observe(StepResult(tree, top_ids[:, 0], [], [0], top_ids, top_probabilities))


class BackgroundCompilation:
    """Compilation of the loops for drafting by another process; threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._other: subprocess.Popen[bytes] | None = None
        self._left = _PATIENCE

    def begin(self, config: LookaheadConfig, note: Callable[[], None] = lambda: None) -> None:
        """Start compilation if needed: in another process, or here if `config` disables background compilation.

        Args:
            config: Configuration of a call.
            note: Called if the call continues without drafts meanwhile.
        """
        if not config.compile_in_background:
            self._wait()
        elif config.preset != "autoregressive" and not compile_loops.cache_info().currsize:
            with self._lock:
                if not LOOPS.awaited and not are_kept():
                    self._other = _start()
                    LOOPS.awaited = True
            if LOOPS.awaited:
                note()

    def _wait(self) -> None:
        with self._lock:
            if LOOPS.awaited:
                if self._other is not None:
                    self._other.wait()
                compile_loops()

    def are_there(self) -> bool:
        """Return whether the loops are usable, at the start of a step; reads them once they are complete."""
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
            compile_loops()
        finally:
            self._lock.release()
        return True


BACKGROUND = BackgroundCompilation()


def _start() -> subprocess.Popen[bytes] | None:
    """Start a process that compiles and may outlive this one; return `None` if it cannot start or cache loops."""
    program = Path(sys.executable or "")
    if loops_folder() is None or getattr(sys, "frozen", False) or "python" not in program.name.lower():
        return None  # perhaps a program with an embedded Python, which cannot run `-c`
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
        Thread(target=process.wait, daemon=True).start()  # reap the process when it ends
    except (OSError, ValueError, RuntimeError):  # too many processes, too little memory, or a path with a zero byte
        return None
    return process


def compile_once() -> int:
    """Compile the loops, unless an earlier process does; return the exit code, 1 if loops could not be cached."""
    with suppress(AttributeError, OSError):  # no priorities on this system, or none lower
        os.nice(5)
    folder = loops_folder()
    if folder is None:
        return 1
    lock = FileLock(folder / "compiling.lock", timeout=_LONGEST)
    with suppress(OSError, Timeout, NotImplementedError):  # without locks both processes compile
        lock.acquire()
    try:
        if not are_kept():
            compile_loops()
    finally:
        lock.release()
    return 0 if are_kept() else 1


class WaitingBudget:
    """Budget (`StepBudget`) that backs off while compilation is awaited.

    Args:
        budget: The budget of one row that decides afterwards.
    """

    ranking = UNRANKED

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._waits = True

    @property
    def backs_off(self) -> bool:
        """Whether this step has no draft."""
        return self._waits or self._budget.backs_off

    @property
    def min_probability(self) -> float:
        """Minimum probability of a candidate that is searched for."""
        return self._budget.min_probability

    @property
    def max_candidates(self) -> int:
        """Maximum number of candidates."""
        return self._budget.max_candidates

    def begin(self, teaches: int = True) -> None:
        """Begin a step (`StepBudget.begin`)."""
        self._waits = LOOPS.awaited
        if not self._waits:
            self._budget.begin(teaches)

    def choose(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the number of candidates to send (`StepBudget.choose`)."""
        return self._budget.choose(likely, counts, roots, rows)


def once_compiled(drafter: AutoDrafter) -> AutoDrafter:
    """Return the drafter, set to start drafting once its loops are compiled."""
    if LOOPS.awaited:
        if drafter.budget.ranking is UNRANKED:  # a pace of all rows is not asked meanwhile
            drafter.budget = WaitingBudget(drafter.budget)
    else:
        compile_loops()  # now, because compilation would distort the measured time of a step
    return drafter
