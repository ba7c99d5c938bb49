"""Which requests the coming step serves."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter
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
        clock: The clock for turns, in seconds.

    Attributes:
        waiting, running: The most urgent first.
    """

    def __init__(
        self,
        max_rows: int,
        room: KVMemory,
        prompt_tokens: int,
        statistics: EngineStatistics,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._max_rows = max_rows
        self._room = room
        self._prompt_tokens = prompt_tokens
        self._statistics = statistics
        self._turns = _Turns(clock)
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

        Running requests that outgrew the memory go back to wait, the last one first. Then those whose turn it is come
        in, as long as there is room; one of a group makes room where the group has more than its share. None
        overtakes one that finds no room, so that a long one gets its turn.
        """
        while len(self.running) > 1 and not self._fits(self.running):
            self._send_back(max(self.running, key=self._turn))
        while (request := self._next()) is not None:
            if len(self.running) < self._max_rows and self._fits([*self.running, request]):
                self.waiting.remove(request)
                insort(self.running, request, key=_BY_URGENCY)
                continue
            last = max(self.running, key=self._turn, default=request)
            if self._turn(last) <= max(self._turn(request), last.urgency):
                break
            self._room.keep(last, self.running)
            self._send_back(last)
        requests = self._share_out()
        self._room.settle(self.running)
        return requests

    def end_step(self) -> None:
        """Count the time of the step that was planned."""
        self._turns.end()

    def _turn(self, request: Request) -> tuple[int, int]:
        """The place of a request among all, the smallest first: one level of priority less for each other request of
        its group that runs."""
        came, number = request.urgency
        group = request.group
        others = 0 if group is None else sum(one.group == group and one is not request for one in self.running)
        return came + PATIENCE * others, number

    def _next(self) -> Request | None:
        """The waiting request whose turn it is."""
        found: Request | None = None
        for request in self.waiting:
            if found is not None and request.urgency > self._turn(found):
                break  # as are all that follow
            if found is None or self._turn(request) < self._turn(found):
                found = request
        return found

    def _send_back(self, request: Request) -> None:
        """Let a running request wait again."""
        self.running.remove(request)
        self._room.drop(request)
        self._statistics.preempted += 1
        self.add(request)

    def _fits(self, requests: Sequence[Request]) -> bool:
        room = self._room
        return room.tokens is None or sum(room.reserved(request.reach) for request in requests) <= room.tokens

    def _share_out(self) -> list[Request]:
        """The requests that take part: all that decode, and prompts up to the token budget for them.

        Prompts that the budget has room for come in their order. Longer ones share what is left of it, and have half
        of it. They take turns with all others, as do rows of a group that has most of all rows.
        """
        lengths = self._room.lengths(self.running)
        sizes = [len(request.sequence.tokens) for request in self.running]
        are_in_groups = any(request.group is not None for request in self.running)
        if not are_in_groups and 0 not in lengths and sum(sizes) - sum(lengths) == len(sizes):  # each has one token
            self._turns.begin(False, True)
            for request in self.running:
                request.row.most_pending = 1
            return list(self.running)
        fresh = {request for request, length in zip(self.running, lengths, strict=True) if not length}
        begun = [one for one in self.running if one not in fresh or self._room.begin(one, self.running)]
        pending = {request: request.length - request.cached for request in begun}
        groups = Counter(request.group for request in begun if request.group is not None)
        large = {group for group, count in groups.items() if count > max(len(begun) // 2, 1)}
        heavy = {one for one in begun if pending[one] > self._prompt_tokens or one.group in large}
        if not self._turns.begin(bool(heavy), len(heavy) < len(begun)):
            begun = [request for request in begun if request not in heavy]
        long = [request for request in begun if pending[request] > self._prompt_tokens]
        parts = {request: 1 for request in begun if pending[request] == 1}
        left = self._prompt_tokens - (self._prompt_tokens // 2 if long else 0)
        for request in begun:
            if 1 < pending[request] <= self._prompt_tokens and left:
                parts[request] = min(pending[request], left)
                left -= parts[request]
        left += self._prompt_tokens // 2 if long else 0
        for place, request in enumerate(long):
            if left:
                parts[request] = max(left // (len(long) - place), 1)
                left -= parts[request]
        for request in self.running:
            if request in fresh and (request.cached or request in parts):
                self._statistics.prompt_tokens += request.length
                self._statistics.reused_tokens += request.cached
                request.handle.statistics.reused_tokens = request.cached
        for request, tokens in parts.items():
            request.row.most_pending = tokens
            request.handle.serve()
        return [request for request in begun if request in parts]


class _Turns:
    """Turns of heavy requests: the time that a step takes longer with them is given to steps of all others, if these
    run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = 0.0
        self._heavy = self._others = False  # whether they take part in the step
        self._light = 0.0  # seconds of a step of the others alone
        self._owed = 0.0  # seconds, to the others

    def begin(self, heavy: bool, others: bool) -> bool:
        """Whether heavy requests take part in the coming step, if there are any, and any others."""
        self._heavy, self._others = heavy and not (others and self._owed > self._light), others
        self._begin = self._clock()
        return self._heavy

    def end(self) -> None:
        """Count the step."""
        spent = self._clock() - self._begin
        if not self._heavy:
            self._light, self._owed = spent, max(self._owed - spent, 0.0)
        elif self._others:
            self._owed += max(spent - self._light, 0.0)
        else:
            self._light, self._owed = 0.0, spent
