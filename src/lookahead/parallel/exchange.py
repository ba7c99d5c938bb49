"""Exchange of small messages between the ranks of a group, and checks that all ranks make the same call.

An exchange raises an error if a rank does not take part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import GenerationConfig

from lookahead.backends.transformers.noise import default_generator
from lookahead.errors import ParallelError
from lookahead.parallel.monitor import Monitor

PATIENCE = 1.0
"""Seconds that a rank waits for the others before it reads their heartbeats."""

_ENDED = "the parallel run has ended: "

Bytes = NDArray[np.uint8]


class Exchange:
    """All-gather of bytes over a process group of CPU tensors.

    Python writes and reads the messages, so they stay in main memory, whatever device the model is on.

    Args:
        group: A process group that carries CPU tensors, `gloo` for example.
        monitor: Heartbeats of the ranks.
        names: Number of each rank among all processes of the run, for messages.
        timeout: Seconds until a live rank that does not join an exchange counts as hung.

    Attributes:
        rank, size: Index of this rank in the group, and number of ranks.
        failure: The error that ended the group; `None` while it works.
    """

    def __init__(self, group: dist.ProcessGroup, monitor: Monitor, names: Sequence[int], timeout: float) -> None:
        self._group = group
        self._monitor = monitor
        self._names = list(names)
        self._timeout = timeout
        self.rank = monitor.rank
        self.size = len(names)
        self.failure: ParallelError | None = None

    def gather(self, message: Bytes) -> list[Bytes]:
        """Send `message` to all ranks; return the messages of all ranks in rank order, all of the same length.

        Raises:
            ParallelError: A rank does not take part; the message names it.
        """
        sent = torch.from_numpy(message.copy())
        received = [torch.empty_like(sent) for _ in self._names]
        self._complete(lambda: dist.all_gather(received, sent, group=self._group, async_op=True))
        return [tensor.numpy() for tensor in received]

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite `tensor`, a CPU tensor, with the values that `rank` passes.

        Raises:
            ParallelError: A rank does not take part; the message names it.
        """
        source = self._names[rank]
        self._complete(lambda: dist.broadcast(tensor, source, group=self._group, async_op=True))

    def report(self, error: BaseException) -> None:
        """End the group because this rank has failed, and report `error` to the others."""
        if not isinstance(error, ParallelError):
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            self.fail(ParallelError(reason), blamed=False)

    def leave(self) -> None:
        """Announce that this rank has finished and joins no further exchange."""
        self._monitor.leave(f"{self.who([self.rank])} has left; all ranks must make the same calls")

    def who(self, ranks: Sequence[int]) -> str:
        """Names of these ranks for a message."""
        names = ", ".join(str(self._names[rank]) for rank in ranks)
        return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"

    def fail(self, error: ParallelError, blamed: bool) -> None:
        """End the group with `error`, and report it to the other ranks."""
        if self.failure is None:
            self.failure = error
            self._monitor.fail(str(error), blamed)

    def _complete(self, begin: Callable[[], dist.Work | None]) -> None:
        """Run one exchange; while it waits, read the heartbeats of the other ranks."""
        if self.failure is not None:
            raise self.failure
        self._monitor.entered()
        work: dist.Work | None = None
        broken: RuntimeError | None = None  # error of a lost connection
        started = monotonic()
        while True:
            try:
                if broken is None:
                    work = work or begin()
                    assert work is not None
                    work.wait(timedelta(seconds=min(PATIENCE, self._timeout)))
                    return
                sleep(0.05)  # the heartbeats that show which rank died arrive later
            except RuntimeError as error:
                if work is None or work.is_completed():
                    started = monotonic()
                    broken = error
            reason = self._reason(broken, monotonic() - started > self._timeout)
            if reason is not None:
                ended = ParallelError(_ENDED + reason.removeprefix(_ENDED))
                self.fail(ended, blamed=True)
                raise ended from broken

    def _reason(self, broken: RuntimeError | None, overdue: bool) -> str | None:
        """Cause of an exchange that does not end; `None` while it is uncertain and the time-out is not `overdue`."""
        monitor = self._monitor
        for rank, sign in monitor.failures():
            return sign.failure if sign.blamed else f"rank {self._names[rank]} failed: {sign.failure}"
        if monitor.store_lost:
            return f"{self._store_keeper()} cannot be reached any more"
        silent = monitor.silent()
        late = monitor.late()
        if broken is not None and silent:
            return f"{self.who(silent)} died: a connection was closed and no heartbeat came since"
        if not overdue:
            return None
        if broken is not None:
            return f"the connection to {self.who(late) if late else 'a rank'} was lost ({str(broken).splitlines()[0]})"
        if monitor.store_silence > self._timeout / 2:
            return f"{self._store_keeper()} has not answered for {monitor.store_silence:.0f} s"
        return f"{self.who(late or silent or range(self.size))} did not come within {self._timeout:g} s and may hang"

    def _store_keeper(self) -> str:
        return f"rank {self._names[0]}, or whatever keeps the ranks' common store,"


def digest(value: object) -> bytes:
    """Hash of `value`, 12 bytes: a tensor, or an object with the same `repr` in every process."""
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return hashlib.sha256(repr(plain).encode()).digest()[:12]


def settings(config: GenerationConfig) -> str:
    """A generation configuration as JSON; objects without a JSON form count by their type."""
    values = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    return json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)


def agree(exchange: Exchange, values: Mapping[str, object]) -> None:
    """Compare `values` between the ranks.

    Args:
        exchange: Communication with the other ranks.
        values: Values that must be equal on all ranks, by name.

    Raises:
        ParallelError: A value differs; the message names it and the ranks. All ranks raise it.
    """
    digests = np.frombuffer(b"".join(map(digest, values.values())), dtype=np.uint8)
    received = np.stack(exchange.gather(digests)).reshape(exchange.size, len(values), -1)  # [ranks, values, bytes]
    problems = []
    for name, differs in zip(values, (received != received[0]).any(axis=2).T, strict=True):
        if differs.any():
            ranks = exchange.who(np.flatnonzero(differs).tolist())
            problems.append(f"{name} on {ranks} differs from that on {exchange.who([0])}")
    if problems:
        raise ParallelError(f"{'; '.join(problems)}: start every rank with the same model, versions and arguments")


def share_random_state(exchange: Exchange, device: torch.device) -> None:
    """Copy the random state of rank 0, used to sample tokens on `device`, to all ranks."""
    generator = default_generator(device)
    state = generator.get_state()
    exchange.broadcast(state, 0)
    generator.set_state(state)
