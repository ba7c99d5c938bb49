"""The exchange of a few bytes between the ranks of a group, which ends with an error if one of them does not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lookahead.errors import ParallelError
from lookahead.parallel.monitor import Monitor

PATIENCE = 1.0
"""Seconds that a rank waits for the others before it reads their heartbeats."""

Bytes = NDArray[np.uint8]


class Exchange:
    """All-gather of bytes over a process group of CPU tensors.

    What is exchanged is made and read by Python, so it lies in main memory, for a model on any device.

    Args:
        group: A process group that carries CPU tensors, `gloo` for example.
        monitor: Signs of life of the ranks.
        names: What messages call each rank: its number among all processes of the run.
        timeout: Seconds until a rank that is alive but does not come counts as hung.
    """

    def __init__(self, group: dist.ProcessGroup, monitor: Monitor, names: Sequence[int], timeout: float) -> None:
        self._group = group
        self._monitor = monitor
        self._names = list(names)
        self._timeout = timeout
        self._error: ParallelError | None = None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self._names)

    @property
    def failure(self) -> ParallelError | None:
        """What ended the group, if something has."""
        return self._error

    def gather(self, own: Bytes) -> list[Bytes]:
        """What each rank gives, in the order of the ranks, `own` of this one among them; all of the same length.

        Raises:
            ParallelError: A rank does not come; the message names it.
        """
        if self._error is not None:
            raise self._error
        sent = torch.from_numpy(own.copy())
        received = [torch.empty_like(sent) for _ in self._names]
        self._complete(lambda: dist.all_gather(received, sent, group=self._group, async_op=True))
        return [tensor.numpy() for tensor in received]

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill `tensor`, a CPU tensor, with that of `rank`.

        Raises:
            ParallelError: A rank does not come; the message names it.
        """
        if self._error is not None:
            raise self._error
        source = self._names[rank]
        self._complete(lambda: dist.broadcast(tensor, source, group=self._group, async_op=True))

    def fail(self, error: ParallelError, blamed: bool) -> None:
        """End the group with `error`, and let the other ranks know."""
        if self._error is None:
            self._error = error
            self._monitor.fail(str(error), blamed)

    def _complete(self, begin: Callable[[], dist.Work | None]) -> None:
        self._monitor.entered()
        try:
            work = begin()
        except RuntimeError as error:  # a connection that is known to be broken
            raise self._lost(error) from error
        assert work is not None
        started = monotonic()
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=min(PATIENCE, self._timeout)))
                    return
                except RuntimeError as error:
                    if work.is_completed():
                        raise self._lost(error) from error
                self._monitor.watch()
                self._look(monotonic() - started)
        finally:
            self._monitor.unwatch()

    def _look(self, waited: float) -> None:
        """Raise if there is a reason why the others will not come."""
        reason = self._reason()
        if reason is None and waited > self._timeout:
            reason = self._overdue()
        if reason is not None:
            raise self._ended(reason)

    def _lost(self, error: RuntimeError) -> ParallelError:
        """Which rank's connection broke: wait a while for the signs that tell."""
        self._monitor.unwatch()
        self._monitor.watch()
        started = monotonic()
        while monotonic() - started < self._timeout:
            reason = self._reason()
            if reason is not None:
                return self._ended(reason)
            silent = self._monitor.silent()
            if silent:
                return self._ended(f"{self._who(silent)} died: a connection was closed and no heartbeat came since")
            sleep(0.05)
        late = self._monitor.late()
        who = self._who(late) if late else "a rank"
        return self._ended(f"the connection to {who} was lost ({str(error).splitlines()[0]})")

    def _overdue(self) -> str:
        """Why the others have not come in time, though no connection is closed."""
        monitor = self._monitor
        if monitor.store_silence > self._timeout / 2:
            return f"{self._store_keeper()} has not answered for {monitor.store_silence:.0f} s"
        late = monitor.late() or monitor.silent() or list(range(self.size))
        return f"{self._who(late)} did not come within {self._timeout:g} s and may hang"

    def _reason(self) -> str | None:
        monitor = self._monitor
        for rank, sign in monitor.failures():
            return sign.failure if sign.blamed else f"rank {self._names[rank]} failed: {sign.failure}"
        left = monitor.left()
        if left:
            return f"{self._who(left)} has left; all ranks must make the same calls"
        if monitor.store_lost:
            return f"{self._store_keeper()} cannot be reached any more"
        return None

    def _ended(self, reason: str) -> ParallelError:
        error = self._error
        if error is None:
            prefix = "the parallel run has ended: "
            error = ParallelError(reason if reason.startswith(prefix) else prefix + reason)
            self.fail(error, blamed=True)
        return error

    def _store_keeper(self) -> str:
        return f"rank {self._names[0]}, or whatever keeps the ranks' common store,"

    def _who(self, ranks: Sequence[int]) -> str:
        names = ", ".join(str(self._names[rank]) for rank in ranks)
        return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
