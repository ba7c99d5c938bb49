"""A team of processes as ranks, reused for many tasks, as their start takes seconds."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lookahead.parallel import ParallelGroup, join
from preloaded import preloaded

Task = Callable[..., Any]
"""Function that a rank runs, with its group and arguments; it must be in a module, and its result is pickled."""


class TaskError(Exception):
    """An exception on a rank; the message is its traceback."""


class Team:
    """`size` processes, with groups of the first one, the first two, and so on, up to all of them.

    Args:
        size: Number of processes.
        timeout: Timeout of each group, as in `join`.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        context = preloaded()
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def run(self, ranks: int, task: Task, *arguments: Any) -> list[Any]:
        """Return the results of `task(group, *arguments)` on the first `ranks` ranks; an exception is a result too."""
        self.begin(ranks, task, *arguments)
        return [self.result(rank) for rank in range(ranks)]

    def begin(self, ranks: int, task: Task, *arguments: Any) -> None:
        """Start a task without waiting for it."""
        for pipe in self.pipes[:ranks]:
            pipe.send((ranks, task, arguments))

    def result(self, rank: int, timeout: float = 600.0) -> Any:
        """Return the result of one rank's task."""
        if not self.pipes[rank].poll(timeout):
            raise TimeoutError(f"rank {rank} has not answered within {timeout} s")
        return self.pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        if not all(process.is_alive() for process in self.processes):  # an orderly shutdown needs all ranks
            for process in self.processes:
                process.kill()
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()
                process.join()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, size: int, port: int, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    groups: dict[int, ParallelGroup] = {}
    for ranks in range(1, size + 1):
        processes: Any = dist.new_group(list(range(ranks)), backend="gloo", timeout=timedelta(seconds=1200))
        if rank < ranks:
            groups[ranks] = join(timeout, process_group=processes)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        ranks, task, arguments = work
        try:
            pipe.send(task(groups[ranks], *arguments))
        except Exception as error:
            pipe.send(TaskError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    for group in groups.values():
        group.close()
