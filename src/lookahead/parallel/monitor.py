"""Heartbeats: each rank writes its own at intervals, and reads the others'.

A heartbeat holds the state of a rank. After a connection is lost, missing heartbeats show which rank died. Missing
heartbeats alone do not prove a death: on a busy machine the sending thread may wait long for Python's lock or the CPU.
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
"""Heartbeats of this rank after which a silent rank counts as dead; a live rank sends at least two meanwhile."""

STORE_PATIENCE = 5.0
"""Seconds that a rank waits for the store to accept its last announcement."""


@dataclass
class Heartbeat:
    """State of a rank.

    Attributes:
        count: Number of earlier heartbeats.
        exchanges: Number of exchanges that the rank has entered.
        failure: Reason why the rank joins no further exchange; empty while it works.
        blamed: Whether `failure` already names the rank to blame; otherwise the sender failed itself.
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
