"""Scheduler: choice of the requests of each step."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.serving.handle import EngineStatistics
    from lookahead.serving.kv_memory import KVMemory
    from lookahead.serving.request import Request

PATIENCE = 1000
"""Steps that one level of priority is worth, so that no request waits forever."""

_BY_URGENCY = attrgetter("urgency")


class Scheduler:
    """Waiting and running requests, most urgent first, and the choice of the requests of each step.

    Args:
        max_rows: Largest number of requests that run at once.
        memory: Memory for their keys and values.
        prompt_tokens: Largest number of prompt tokens in a step, so that a long prompt does not delay others.
        statistics: Counts to update: preempted requests, and prompt tokens.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        max_rows: int,
        memory: KVMemory,
        prompt_tokens: int,
        statistics: EngineStatistics,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._max_rows = max_rows
        self._memory = memory
        self._prompt_tokens = prompt_tokens
        self._statistics = statistics
        self._turns = _Turns(clock)
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """Waiting and running requests."""
        return [*self.waiting, *self.running]

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=_BY_URGENCY)

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, failed or was cancelled."""
        (self.running if request in self.running else self.waiting).remove(request)

    def plan(self) -> list[Request]:
        """Return the requests of the next step, most urgent first.

        If running requests outgrow the memory, the last ones are preempted. Then waiting requests join in order while
        there is memory; a request of an overrepresented group is preempted for them. The queue never skips a request
        that does not fit, so that long ones get their turn.
        """
        while not self._memory.still_fits(self.running) and len(self.running) > 1:
            self._preempt(max(self.running, key=self._turn))
        while (request := self._next()) is not None:
            has_row = len(self.running) < self._max_rows
            if has_row and (self._memory.fits([*self.running, request]) or not self.running):
                self.waiting.remove(request)
                insort(self.running, request, key=_BY_URGENCY)
                continue
            last = max(self.running, key=self._turn, default=request)
            if self._turn(last) <= max(self._turn(request), last.urgency):
                break
            self._memory.keep(last, self.running)
            self._preempt(last)
        requests = self._select()
        self._memory.settle(self.running)
        return requests

    def end_step(self) -> None:
        """Count the time of the step."""
        self._turns.end()

    def _turn(self, request: Request) -> tuple[int, int]:
        """Return a request's urgency, lowered by one priority for each other running request of its group."""
        step, number = request.urgency
        group = request.group
        others = 0 if group is None else sum(one.group == group and one is not request for one in self.running)
        return step + PATIENCE * others, number

    def _next(self) -> Request | None:
        """Return the most urgent waiting request."""
        best: Request | None = None
        for request in self.waiting:
            if best is not None and request.urgency > self._turn(best):
                break  # all further ones are less urgent too
            if best is None or self._turn(request) < self._turn(best):
                best = request
        return best

    def _preempt(self, request: Request) -> None:
        """Return a running request to the queue."""
        self.running.remove(request)
        self._memory.drop(request)
        self._statistics.preempted += 1
        self.add(request)

    def _select(self) -> list[Request]:
        """Select all decoding requests, and prompts within their token budget.

        Short prompts come in order. Prompts longer than the budget share at least half of it, and take turns with all
        other requests. So do the rows of a group with more than half of all rows.
        """
        lengths = self._memory.lengths(self.running)
        sizes = [len(request.sequence.tokens) for request in self.running]
        are_in_groups = any(request.group is not None for request in self.running)
        if not are_in_groups and 0 not in lengths and sum(sizes) - sum(lengths) == len(sizes):  # each has one token
            self._turns.begin(False, True)
            for request in self.running:
                request.row.most_pending = 1
            return list(self.running)
        fresh = {request for request, length in zip(self.running, lengths, strict=True) if not length}
        ready = [one for one in self.running if one not in fresh or self._memory.begin(one, self.running)]
        pending = {request: request.length - request.cached for request in ready}
        groups = Counter(request.group for request in ready if request.group is not None)
        large = {group for group, count in groups.items() if count > max(len(ready) // 2, 1)}
        heavy = {one for one in ready if pending[one] > self._prompt_tokens or one.group in large}
        if not self._turns.begin(bool(heavy), len(heavy) < len(ready)):
            ready = [request for request in ready if request not in heavy]
        long = [request for request in ready if pending[request] > self._prompt_tokens]
        parts = {request: 1 for request in ready if pending[request] == 1}
        budget = self._prompt_tokens - (self._prompt_tokens // 2 if long else 0)
        for request in ready:
            if 1 < pending[request] <= self._prompt_tokens and budget:
                parts[request] = min(pending[request], budget)
                budget -= parts[request]
        budget += self._prompt_tokens // 2 if long else 0
        for number, request in enumerate(long):
            if budget:
                parts[request] = max(budget // (len(long) - number), 1)
                budget -= parts[request]
        for request in self.running:
            if request in fresh and (request.cached or request in parts):
                self._statistics.prompt_tokens += request.length
                self._statistics.reused_tokens += request.cached
                request.handle.statistics.reused_tokens = request.cached
        for request, tokens in parts.items():
            request.row.most_pending = tokens
            request.handle.serve()
        return [request for request in ready if request in parts]


class _Turns:
    """Turns of heavy requests. Other requests get steps without them for as long as heavy ones delayed their steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = 0.0
        self._heavy = False  # whether heavy requests take part in the step
        self._others = False  # whether other requests take part
        self._light = 0.0  # seconds of a step without heavy requests
        self._owed = 0.0  # seconds of delay not yet made up for

    def begin(self, heavy: bool, others: bool) -> bool:
        """Return whether heavy requests take part in the next step, given which kinds of requests there are."""
        self._heavy = heavy and not (others and self._owed > self._light)
        self._others = others
        self._begin = self._clock()
        return self._heavy

    def end(self) -> None:
        """Count the step."""
        seconds = self._clock() - self._begin
        if not self._heavy:
            self._light = seconds
            self._owed = max(self._owed - seconds, 0.0)
        elif self._others:
            self._owed += max(seconds - self._light, 0.0)
        else:
            self._light = 0.0
            self._owed = seconds
