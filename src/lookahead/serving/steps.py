"""The steps of requests, those of one call of `generate` or those that an engine serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lookahead.core.decoder import Batch, step, verify_row
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import Statistics
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import Walk
from lookahead.serving.request import Request

LONGEST_PART = 1024
"""Tokens of a prompt in a pass, at most, where nothing is said about it."""


class Steps:
    """Runs requests, step by step.

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
        self.batch = Batch((), clock=clock, times=pace, packed=come_and_go)
        self._requests: Sequence[Request] = ()
        if come_and_go:
            self.batch.verify = self._verify

    def run(self, requests: Sequence[Request], statistics: Statistics) -> None:
        """Make one step.

        Args:
            requests: Who takes part. A processor or criterion that raises ends its own request alone, where rows come
                and go: `Request.error` says so.
            statistics: Counts and times are added to it.
        """
        batch = self.batch
        batch.sequences, batch.statistics = [request.sequence for request in requests], statistics
        if self.come_and_go:
            self._requests = requests
            self.backend.rows = [request.row for request in requests]
            self._share(requests)
        try:
            step(self.backend, batch)
        finally:  # an error keeps this object, which is not to keep requests
            batch.sequences = self._requests = ()

    def _share(self, requests: Sequence[Request]) -> None:
        shared = self._pace if isinstance(self._pace, SharedPace) else None
        if shared is not None and not any(request.drafting.shares for request in requests):
            shared = None
        if shared is not None:
            temperature = sum(request.arguments.temperature for request in requests) / len(requests)
            shared.begin(len(requests), temperature)
        self.batch.times = shared
        self.batch.share_out = None if shared is None else shared.share_out

    def _verify(self, batch: Batch, trees: Sequence[TokenTree], outputs: Sequence[Any]) -> list[Walk | None]:
        """Walks the tree of each request by itself."""
        walks: list[Walk | None] = [None] * len(trees)
        for row, request in enumerate(self._requests):
            try:
                walks[row] = verify_row(request.sequence, trees[row], outputs[row])
            except Exception as error:
                request.error = error
                request.sequence.finished = True
        return walks

    @torch.no_grad()
    def prefill(self, requests: Sequence[Request], chunk_size: int | None) -> int:
        """Send long texts ahead in parts, so that the first step has few pending tokens; returns how many passes."""
        texts = [request.sequence.tokens for request in requests]
        if not self.come_and_go:
            return int(self.backend.prefill(texts, chunk_size))
        size, passes = chunk_size or LONGEST_PART, 0
        while long := [request for request in requests if request.length - request.cached > size]:
            self.backend.rows = [request.row for request in long]
            parts = [request.sequence.tokens[request.cached :][:size] for request in long]
            self.backend.forward([TokenTree(part) for part in parts])
            self.backend.commit([range(len(part)) for part in parts])
            passes += 1
        return passes
