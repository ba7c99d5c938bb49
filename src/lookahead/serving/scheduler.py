"""Which requests the coming step serves."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.serving.handle import EngineStatistics
    from lookahead.serving.kv_memory import KVMemory
    from lookahead.serving.request import Request

PATIENCE = 1000
"""Steps that one level of priority is worth: a request waits for those of the next level that came up to so many steps
after it, and for no later ones. So none waits for ever."""

_BY_URGENCY = attrgetter("urgency")


class Scheduler:
    """Waiting and running requests, and the choice of those that take part in the coming step.

    Args:
        max_rows, room: Most requests that run at once, and where their keys and values go.
        prompt_tokens: Most tokens of prompts in one step, so that a long prompt does not hold up the others.
        statistics: Requests that wait again, and tokens that requests begin with, are added to it.

    Attributes:
        waiting: In the order in which they will run.
        running: The most urgent first.
    """

    def __init__(self, max_rows: int, room: KVMemory, prompt_tokens: int, statistics: EngineStatistics) -> None:
        self._max_rows = max_rows
        self._room = room
        self._prompt_tokens = prompt_tokens
        self._statistics = statistics
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return [*self.waiting, *self.running]

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        insort(self.waiting, request, key=_BY_URGENCY)

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, failed or was cancelled."""
        (self.running if request in self.running else self.waiting).remove(request)

    def plan(self) -> list[Request]:
        """The requests of the coming step, the most urgent first; none if there are none.

        Running requests that outgrew the memory go back to wait, the last one first. Then those who waited longest
        come in, as long as there is room. None overtakes a more urgent one that finds no room, so that a long one
        gets its turn.
        """
        while len(self.running) > 1 and not self._fits(self.running):
            last = self.running.pop()
            self._room.drop(last)
            self._statistics.preempted += 1
            self.add(last)
        while self.waiting and len(self.running) < self._max_rows and self._fits([*self.running, self.waiting[0]]):
            insort(self.running, self.waiting.pop(0), key=_BY_URGENCY)
        requests = self._share_out()
        self._room.settle(self.running)
        return requests

    def _fits(self, requests: Sequence[Request]) -> bool:
        room = self._room
        return room.tokens is None or sum(room.reserved(request.reach) for request in requests) <= room.tokens

    def _share_out(self) -> list[Request]:
        """The requests that take part: all that decode, and prompts up to the token budget for them."""
        served, left = [], self._prompt_tokens
        for request in self.running:
            if not request.cached:
                if not left or not self._room.begin(request, self.running):
                    continue
                self._statistics.prompt_tokens += request.length
                self._statistics.reused_tokens += request.cached
                request.handle.statistics.reused_tokens = request.cached
            pending = request.length - request.cached
            tokens = pending if pending == 1 else min(pending, left)
            if tokens:
                request.row.most_pending = tokens
                served.append(request)
                left -= tokens if pending > 1 else 0
        return served
