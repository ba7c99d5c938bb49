"""Heartbeats: each rank writes its own now and then, and reads those of the others while it waits."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from math import inf
from time import monotonic

from torch.distributed.distributed_c10d import Store

INTERVAL = 0.5
"""Seconds between two heartbeats."""

SILENCE = 5.0
"""Seconds without one after which a rank counts as gone. A busy rank sends heartbeats too, from a thread."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself.

    Attributes:
        count: How many came before.
        exchanges: How many exchanges the rank has entered.
        left: Whether the rank has left the group in good order.
        failure: Why it will come to no further exchange; empty if all is well.
        blamed: Whether the failure is another rank's, as this one sees it.
    """

    count: int = 0
    exchanges: int = 0
    left: bool = False
    failure: str = ""
    blamed: bool = False


class Monitor:
    """The heartbeats of a group, in a store that all ranks reach.

    All talk with the store is a thread's, so that a store that hangs holds nobody up.

    Args:
        store: Where heartbeats are written; nobody else uses these keys.
        rank: This rank.
        size: Ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # A client of its own, where torch can make one: else a query of the main thread waits for this one's.
        self._store: Store = store.clone() if hasattr(store, "clone") else store
        self._rank, self._size = rank, size
        self._count = 0  # of heartbeats written; the other fields are set by the main thread
        self._exchanges = 0
        self._left = self._blamed = False
        self._failure = ""
        self._heartbeats: list[Heartbeat] = [Heartbeat()] * size
        self._changed: list[float] = [0.0] * size
        self._watching = threading.Event()
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._round = monotonic()
        self._send_heartbeat()
        self._store.wait([self._key(other) for other in range(size)])
        self._thread = threading.Thread(target=self._run, name="lookahead-monitor", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """Count an exchange."""
        self._exchanges += 1

    def fail(self, failure: str, blamed: bool) -> None:
        """Let the others know, as soon as the store takes it, that this rank comes to no further exchange."""
        if not self._failure:
            self._blamed = blamed
            self._failure = failure
            self._flush()

    def leave(self) -> None:
        """Let the others know that this rank is through; it sends no further heartbeat."""
        self._left = True
        self._flush()
        self._stopped.set()
        self._awake.set()
        self._thread.join(timeout=2 * INTERVAL)

    def watch(self) -> None:
        """Begin to read the heartbeats of the others; for one that waits for them."""
        if not self._watching.is_set():
            now = monotonic()
            self._changed = [now] * self._size
            self._round = max(self._round, now) if self._thread.is_alive() else -inf
            self._watching.set()
            self._awake.set()

    def unwatch(self) -> None:
        """No longer read the heartbeats of the others."""
        self._watching.clear()

    @property
    def store_silent(self) -> bool:
        """Whether the store is lost, or has not answered for longer than `SILENCE`."""
        return monotonic() - self._round > SILENCE

    def failures(self) -> list[tuple[int, Heartbeat]]:
        """What other ranks say about why they come to no further exchange; those that blame nobody else first."""
        found = [(rank, heartbeat) for rank, heartbeat in self._others() if heartbeat.failure]
        return sorted(found, key=lambda each: (each[1].blamed, each[0]))

    def left(self) -> list[int]:
        """Ranks that have left the group."""
        return [rank for rank, heartbeat in self._others() if heartbeat.left]

    def silent(self) -> list[int]:
        """Ranks that sent no heartbeat for longer than `SILENCE` since `watch`."""
        now = monotonic()
        return [rank for rank, _ in self._others() if now - self._changed[rank] > SILENCE]

    def late(self) -> list[int]:
        """Ranks that have not come to the exchange that this one is in."""
        return [rank for rank, heartbeat in self._others() if heartbeat.exchanges < self._exchanges]

    def _others(self) -> list[tuple[int, Heartbeat]]:
        return [(rank, heartbeat) for rank, heartbeat in enumerate(self._heartbeats) if rank != self._rank]

    def _flush(self) -> None:
        """Give the thread a moment to bring what was said to the store."""
        count = self._count + 2  # one heartbeat may be on its way
        end = monotonic() + 2 * INTERVAL
        while self._count < count and monotonic() < end and self._thread.is_alive():
            self._awake.set()
            self._stopped.wait(0.01)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._awake.wait(INTERVAL)
            self._awake.clear()
            try:
                self._send_heartbeat()
                if self._watching.is_set():
                    self._read()
            except (RuntimeError, ValueError):
                # A connection to the store that is lost does not come back.
                self._round = -inf
                return
            self._round = monotonic()

    def _send_heartbeat(self) -> None:
        heartbeat = Heartbeat(self._count, self._exchanges, self._left, self._failure, self._blamed)
        self._store.set(self._key(self._rank), json.dumps(asdict(heartbeat)))
        self._count += 1

    def _read(self) -> None:
        texts = self._store.multi_get([self._key(rank) for rank in range(self._size)])
        heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
        now = monotonic()
        for rank, heartbeat in enumerate(heartbeats):
            if heartbeat.count != self._heartbeats[rank].count:
                self._changed[rank] = now
        self._heartbeats = heartbeats

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"
