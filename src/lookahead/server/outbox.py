"""Steps of answers on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lookahead.serving.handle import TokenEvent
from lookahead.trace import TracedStep

_PAUSE = 0.0008
"""Seconds between two deliveries, for each running answer, so that writing rarely delays the engine's thread."""
_LONGEST = 0.05
"""Largest number of seconds between two deliveries."""


@dataclass
class Piece:
    """Addition of one step to an answer, or of several steps that are read together.

    Attributes:
        tokens: The tokens.
        nodes: Nodes sent.
        finished: Whether the answer is complete with it.
        seconds: Time since the previous step of the answer, or since the request arrived if it is the first one.
        is_first: Whether it is the first one.
        step: The proposed tree, if requested.
        text: Text that no later token changes.
        logprobs: Log-probabilities of the tokens, if requested.
    """

    tokens: list[int] = field(default_factory=list)
    nodes: int = 0
    finished: bool = False
    seconds: float = 0.0
    is_first: bool = False
    step: TracedStep | None = None
    text: str = ""
    logprobs: list[TokenEvent] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append the next piece, before the text of both is read."""
        self.tokens += piece.tokens
        self.nodes += piece.nodes
        self.finished = piece.finished


Receive = Callable[[Piece | None], None]


class Outbox:
    """Passes the steps of all answers of a model to the event loop, in one call for many. First steps are not delayed.

    Args:
        count: Called with all pieces of a delivery.
    """

    def __init__(self, count: Callable[[Sequence[Piece]], None]) -> None:
        self._count = count
        self._items: deque[tuple[Receive, Piece | None]] = deque()
        self._is_called = False  # whether a delivery is scheduled
        self._next = 0.0  # earliest time of the next delivery
        self._open: set[Receive] = set()  # of running answers

    def put(self, loop: asyncio.AbstractEventLoop, receive: Receive, piece: Piece | None) -> None:
        """Schedule a call of `receive` in the loop's thread. Any thread may call it.

        Args:
            loop: The event loop.
            receive: Function to call.
            piece: Argument of the call; `None` for the end of an answer.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._items.append((receive, piece))
            if piece is not None and piece.is_first:
                loop.call_soon_threadsafe(self._deliver, loop)
            elif not self._is_called:
                self._is_called = True
                loop.call_soon_threadsafe(self._plan, loop)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.time() < self._next:
            loop.call_at(self._next, self._deliver, loop)
        else:
            self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_called = False  # before items are read: later ones schedule another delivery
        items = [self._items.popleft() for _ in range(len(self._items))]
        self._count([piece for _, piece in items if piece is not None])
        for receive, piece in items:
            if piece is None:
                self._open.discard(receive)
            elif piece.is_first:
                self._open.add(receive)
            receive(piece)
        self._next = loop.time() + min(_PAUSE * len(self._open), _LONGEST)
