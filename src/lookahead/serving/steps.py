"""The steps of requests, those of one call of `generate` or those that an engine serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import Statistics
from lookahead.core.step import Batch, step
from lookahead.core.step_time import StepTimer
from lookahead.serving.request import Request


class Steps:
    """Runs requests, step by step, timed for a pace.

    Args:
        backend: Runs their trees.
        clock: The clock for its steps, in seconds.
        pace: Chooses their nodes, if that is to go by the clock: those of each, or of all together.
        come_and_go: Whether the rows of `backend` do, so that each step has its own; else it has all of a call.

    Attributes:
        backend: Likewise.
        come_and_go: Likewise.
        batch: What is handed to `step`.
    """

    def __init__(
        self,
        backend: Any,
        clock: Callable[[], float],
        pace: Pace | SharedPace | None = None,
        come_and_go: bool = True,
    ) -> None:
        self.backend = backend
        self.come_and_go = come_and_go
        self._pace = pace
        # A thread's own time is a call into the system.
        self._timer = StepTimer(perf_counter if pace is None else clock, perf_counter, packed=come_and_go)
        self.batch = Batch((), mark=self._timer.mark)

    def run(self, requests: Sequence[Request], statistics: Statistics) -> None:
        """Make one step.

        Args:
            requests: Who takes part. What one of them raises is in `SequenceState.error`.
            statistics: Counts and times are added to it.
        """
        batch = self.batch
        batch.sequences, batch.statistics = [request.sequence for request in requests], statistics
        if self.come_and_go:
            self.backend.rows = [request.row for request in requests]
        pace = self._pace_of(requests)
        batch.share_out = pace.share_out if isinstance(pace, SharedPace) else None
        try:
            self._timer.begin(batch)
            done = step(self.backend, batch)
            if pace is not None:
                pace.book(self._timer.end(batch, done))
        finally:  # an error keeps this object, which is not to keep requests
            batch.sequences = ()
            if self.come_and_go:  # nor rows, whose memory others may take
                self.backend.rows = []

    def _pace_of(self, requests: Sequence[Request]) -> Pace | SharedPace | None:
        """What chooses the nodes of the coming step, by its time; one that is shared is told who shares it."""
        pace = self._pace
        if isinstance(pace, SharedPace):
            if not any(request.drafting.shares for request in requests):
                return None
            pace.begin(len(requests), sum(request.arguments.temperature for request in requests) / len(requests))
        return pace

    def prefill(self, requests: Sequence[Request], chunk_size: int | None) -> int:
        """Send long texts ahead in parts, so that the first step has few pending tokens; returns how many passes."""
        if self.come_and_go:
            self.backend.rows = [request.row for request in requests]
        return int(self.backend.prefill([request.sequence.tokens for request in requests], chunk_size))
