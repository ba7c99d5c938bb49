"""Messages between the ranks of a group, heartbeats, and checks that all ranks make the same call.

Each rank writes its heartbeat at intervals, and reads the others'. After a connection is lost, missing heartbeats show
which rank died. Missing heartbeats alone do not prove a death: on a busy machine the sending thread may wait long for
Python's lock or the CPU.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store
from transformers import GenerationConfig

from lookahead.backends.transformers.noise import default_generator
from lookahead.errors import ParallelError

INTERVAL = 0.5
"""Seconds between two heartbeats."""

ROUNDS = 6
"""Heartbeats of this rank after which a silent rank counts as dead; a live rank sends at least two meanwhile."""

STORE_PATIENCE = 5.0
"""Seconds that a rank waits for the store to accept its last announcement."""


@dataclass
class Heartbeat:
    """State of a rank: its earlier heartbeats, and the exchanges that it has entered.

    `failure` is the reason why the rank joins no further exchange; empty while it works. `blamed` says whether it names
    the rank to blame; otherwise the sender failed itself.
    """

    count: int = 0
    exchanges: int = 0
    failure: str = ""
    blamed: bool = False


class Monitor:
    """Heartbeats of a group, in a store that all ranks can reach.

    Only a background thread accesses the store, so a hanging store does not block decoding.

    Args:
        store: Store of the heartbeats, with its own key prefix.
        rank, size: Index of this rank in the group, and number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # A separate connection, if torch can make one: otherwise queries of the main thread wait for this thread's.
        self._store: Store = store.clone() if hasattr(store, "clone") else store
        self.rank = rank
        self._size = size
        self._next = Heartbeat()  # the next one to send: the thread counts, the main thread sets the other fields
        self._heartbeats: list[Heartbeat] = [Heartbeat()] * size
        self._last_seen = [0] * size  # by rank: this rank's heartbeat count when a new heartbeat was last read
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._answered = monotonic()
        self._send_heartbeat()
        self._store.wait([self._key(other) for other in range(size)])
        self._thread = threading.Thread(target=self._run, name="lookahead-monitor", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """Count an exchange of this rank."""
        self._next.exchanges += 1

    def fail(self, failure: str, blamed: bool) -> None:
        """Announce that this rank joins no further exchange, as soon as the store accepts it."""
        if not self._next.failure:
            self._next.blamed = blamed
            self._next.failure = failure
            self._flush()

    def leave(self, why: str) -> None:
        """Announce that this rank has finished, and stop its heartbeat."""
        self.fail(why, blamed=True)
        self._stopped.set()
        self._awake.set()
        self._thread.join(timeout=2 * INTERVAL)

    @property
    def store_lost(self) -> bool:
        """Whether the connection to the store is broken."""
        return not self._thread.is_alive()

    @property
    def store_silence(self) -> float:
        """Seconds since the store last answered."""
        return monotonic() - self._answered

    def failures(self) -> list[tuple[int, Heartbeat]]:
        """Failures reported by other ranks, a rank's own failure before blame of another."""
        failures = [(rank, heartbeat) for rank, heartbeat in self._other_ranks() if heartbeat.failure]
        return sorted(failures, key=lambda failure: (failure[1].blamed, failure[0]))

    def silent(self) -> list[int]:
        """Ranks without a new heartbeat during the last `ROUNDS` heartbeats of this rank."""
        return [rank for rank, _ in self._other_ranks() if self._next.count - self._last_seen[rank] >= ROUNDS]

    def late(self) -> list[int]:
        """Ranks that have not entered the current exchange of this rank."""
        return [rank for rank, heartbeat in self._other_ranks() if heartbeat.exchanges < self._next.exchanges]

    def _other_ranks(self) -> list[tuple[int, Heartbeat]]:
        return [(rank, heartbeat) for rank, heartbeat in enumerate(self._heartbeats) if rank != self.rank]

    def _flush(self) -> None:
        """Wait briefly for the thread to write pending announcements to the store."""
        count = self._next.count + 2  # one heartbeat may be on its way
        end = monotonic() + STORE_PATIENCE
        while self._next.count < count and monotonic() < end and self._thread.is_alive():
            self._awake.set()
            self._stopped.wait(0.01)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._awake.wait(INTERVAL)
            self._awake.clear()
            try:
                self._send_heartbeat()
                self._read()
            except (RuntimeError, ValueError):
                return  # a lost connection to the store is not restored
            self._answered = monotonic()

    def _send_heartbeat(self) -> None:
        self._store.set(self._key(self.rank), json.dumps(asdict(self._next)))
        self._next.count += 1

    def _read(self) -> None:
        texts = self._store.multi_get([self._key(rank) for rank in range(self._size)])
        heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
        for rank, heartbeat in enumerate(heartbeats):
            if heartbeat.count != self._heartbeats[rank].count:
                self._last_seen[rank] = self._next.count
        self._heartbeats = heartbeats

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"


PATIENCE = 1.0
"""Seconds that a rank waits for the others before it reads their heartbeats."""

_ENDED = "the parallel run has ended: "

Bytes = NDArray[np.uint8]


class Exchange:
    """All-gather of bytes over a process group of CPU tensors.

    Messages stay in main memory, whatever device the model is on, as Python writes and reads them. An exchange raises a
    `ParallelError` that names the rank if one does not take part.

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
        """Send `message` to all ranks; return the messages of all ranks in rank order, all of the same length."""
        data = torch.from_numpy(message.copy())
        received = [torch.empty_like(data) for _ in self._names]
        self._complete(lambda: dist.all_gather(received, data, group=self._group, async_op=True))
        return [tensor.numpy() for tensor in received]

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite `tensor`, a CPU tensor, with the values that `rank` passes."""
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
        is_late = False
        while True:
            try:
                if broken is None:
                    work = work or begin()
                    assert work is not None
                    is_late = not work.is_completed()
                    work.wait(timedelta(seconds=min(PATIENCE, self._timeout)))
                    return
                sleep(0.05)  # the heartbeats that show which rank died arrive later
            except RuntimeError as error:
                # A wait that began before the end may raise its own time limit, even if the work has succeeded since.
                if not is_late:
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
    """Compare `values`, which must be equal on all ranks, by name.

    Raises:
        ParallelError: A value differs; the message names it and the ranks. All ranks raise it.
    """
    digests = np.frombuffer(b"".join(map(digest, values.values())), dtype=np.uint8)
    received = np.stack(exchange.gather(digests)).reshape(exchange.size, len(values), -1)  # [ranks, values, bytes]
    problems = [
        f"{name} on {exchange.who(np.flatnonzero(differs).tolist())} differs from that on {exchange.who([0])}"
        for name, differs in zip(values, (received != received[0]).any(axis=2).T, strict=True)
        if differs.any()
    ]
    if problems:
        raise ParallelError(f"{'; '.join(problems)}: start every rank with the same model, versions and arguments")


def share_random_state(exchange: Exchange, device: torch.device) -> None:
    """Copy the random state of rank 0, used to sample tokens on `device`, to all ranks."""
    generator = default_generator(device)
    state = generator.get_state()
    exchange.broadcast(state, 0)
    generator.set_state(state)
