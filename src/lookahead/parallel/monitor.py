"""Heartbeats: each rank writes its own now and then, and reads those of the others.

They say what a rank says of itself, and tell ranks apart once it is known that one has died. A rank that sends none is
not dead for that: the thread that sends them needs Python's lock and a share of the processor, and on a busy machine
it may get neither for long.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from time import monotonic

from torch.distributed.distributed_c10d import Store

INTERVAL = 0.5
"""Seconds between two heartbeats."""

ROUNDS = 6
"""Heartbeats of this rank after which a silent rank counts as dead. A live one sends at least two meanwhile; a busy
machine slows all ranks alike."""

STORE_PATIENCE = 5.0
"""Seconds that a rank waits for the store to take what it says last."""


@dataclass
class Heartbeat:
    """What a rank says of itself.

    Attributes:
        count: How many came before.
        exchanges: How many exchanges the rank has entered.
        failure: Why it will come to no further exchange; empty if it will.
        blamed: Whether that names who is to blame, such as another rank; else it is this one's own failure.
    """

    count: int = 0
    exchanges: int = 0
    failure: str = ""
    blamed: bool = False


class Monitor:
    """The heartbeats of a group, in a store that all ranks reach.

    All talk with the store is a thread's, so that a store that hangs holds nobody up.

    Args:
        store: Where heartbeats are written; nobody else uses these keys.
        rank, size: This rank, and the ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # A client of its own, where torch can make one: else a query of the main thread waits for this one's.
        self._store: Store = store.clone() if hasattr(store, "clone") else store
        self.rank, self._size = rank, size
        self._next = Heartbeat()  # the next one to send: the thread counts, the main thread sets the other fields
        self._heartbeats: list[Heartbeat] = [Heartbeat()] * size
        self._heard = [0] * size  # how many of its own this rank had sent when it read the last new one of each
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._answered = monotonic()
        self._send_heartbeat()
        self._store.wait([self._key(other) for other in range(size)])
        self._thread = threading.Thread(target=self._run, name="lookahead-monitor", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """Count an exchange."""
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
        """Seconds since the store has answered."""
        return monotonic() - self._answered

    def failures(self) -> list[tuple[int, Heartbeat]]:
        """Failures that other ranks reported, those that blame nobody else first."""
        found = [(rank, heartbeat) for rank, heartbeat in self._other_ranks() if heartbeat.failure]
        return sorted(found, key=lambda failure: (failure[1].blamed, failure[0]))

    def silent(self) -> list[int]:
        """Ranks of which no heartbeat was read in the time of `ROUNDS` of this rank."""
        return [rank for rank, _ in self._other_ranks() if self._next.count - self._heard[rank] >= ROUNDS]

    def late(self) -> list[int]:
        """Ranks that have not come to the exchange that this one is in."""
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
                return  # a connection to the store that is lost does not come back
            self._answered = monotonic()

    def _send_heartbeat(self) -> None:
        self._store.set(self._key(self.rank), json.dumps(asdict(self._next)))
        self._next.count += 1

    def _read(self) -> None:
        texts = self._store.multi_get([self._key(rank) for rank in range(self._size)])
        heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
        for rank, heartbeat in enumerate(heartbeats):
            if heartbeat.count != self._heartbeats[rank].count:
                self._heard[rank] = self._next.count
        self._heartbeats = heartbeats

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"
