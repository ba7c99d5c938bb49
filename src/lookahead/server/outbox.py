"""Steps of answers on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from lookahead.serving.handle import TokenEvent
from lookahead.trace import TracedStep

_PAUSE = 0.0016
"""Seconds between two deliveries, for each running answer, so that writing rarely delays the engine's thread."""
_SHORTEST, _LONGEST = 0.02, 0.1
"""Limits of the seconds between two deliveries. A delivery costs 8 % of a token of the demo model."""

_UNSTREAMED = 64
"""Steps of a delivery without a stream: only counts of tokens wait for them."""


class AnswerStep(NamedTuple):
    """One step of an answer.

    Attributes:
        tokens: The tokens.
        nodes: Nodes sent.
        finished: Whether the answer is complete with it.
        seconds: Time since the previous step of the answer, or since the request arrived if it is the first one.
        is_first: Whether it is the first one.
        trace: The proposed tree, if requested.
    """

    tokens: list[int]
    nodes: int
    finished: bool
    seconds: float
    is_first: bool
    trace: TracedStep | None


@dataclass(slots=True)
class Piece:
    """Addition to an answer: one step with a trace, or all steps that are delivered together.

    Attributes:
        tokens: The tokens.
        nodes: Nodes sent, if there is a trace.
        finished: Whether the answer is complete with it.
        trace: The proposed tree, if requested.
        text: Text that no later token changes.
        logprobs: Log-probabilities of the tokens, if requested.
    """

    tokens: list[int] = field(default_factory=list)
    nodes: int = 0
    finished: bool = False
    trace: TracedStep | None = None
    text: str = ""
    logprobs: list[TokenEvent] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append the next piece, before the text of both is read."""
        self.tokens += piece.tokens
        self.finished = piece.finished


def _pieces(steps: Sequence[AnswerStep | None]) -> list[Piece | None]:
    """Return a piece for all steps, or for each one if they have traces. `None` is the end of the answer."""
    new = [step for step in steps if step is not None]
    pieces: list[Piece | None] = []
    if new and new[0].trace is not None:
        pieces += [Piece(list(step.tokens), step.nodes, step.finished, step.trace) for step in new]
    elif new:
        pieces.append(Piece([token for step in new for token in step.tokens], finished=new[-1].finished))
    return pieces if steps[-1] is not None else [*pieces, None]


class Channel:
    """Steps of one answer that the event loop has not received yet.

    Args:
        outbox: Outbox of the model.
        loop: The event loop.
        receive: Called in the loop's thread with new pieces; `None` is the end of the answer.
        streams: Whether a client waits for the pieces.
    """

    def __init__(
        self,
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[Sequence[Piece | None]], None],
        streams: bool,
    ) -> None:
        self._outbox, self._loop, self.receive, self._streams = outbox, loop, receive, streams
        self._steps: deque[AnswerStep | None] = deque()
        self.is_listed = False  # whether the next delivery has it

    def put(self, step: AnswerStep | None) -> None:
        """Schedule the delivery of a step, or of the end of the answer. One thread at a time may call it."""
        self._steps.append(step)
        if step is None or (step.is_first and self._streams):  # clients wait for these
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._outbox.deliver, [self])
        elif not self.is_listed and (self._streams or len(self._steps) >= _UNSTREAMED):
            self.is_listed = True
            self._outbox.put(self, self._loop)

    def take(self) -> list[AnswerStep | None]:
        """Return and remove the steps. Call it in the loop's thread."""
        return [self._steps.popleft() for _ in range(len(self._steps))]


class Outbox:
    """Passes the steps of all answers of a model to the event loop, in one call for many.

    First steps and ends of answers are not delayed.

    Args:
        count: Called with all steps of a delivery.
    """

    def __init__(self, count: Callable[[Sequence[AnswerStep]], None]) -> None:
        self._count = count
        self._channels: deque[Channel] = deque()
        self._is_planned = False  # whether a delivery is
        self._running: set[Channel] = set()

    def put(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the delivery of a channel. Any thread may call it."""
        self._channels.append(channel)
        if not self._is_planned:
            self._is_planned = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver_all, loop)

    def _deliver_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_planned = False  # before channels are read: later ones plan another delivery
        channels = [self._channels.popleft() for _ in range(len(self._channels))]
        if not channels:
            return
        self._is_planned = True
        for channel in channels:
            channel.is_listed = False  # before its steps are read
        pause = min(max(_PAUSE * len(self._running), _SHORTEST), _LONGEST)
        loop.call_later(pause, self._deliver_all, loop)
        self.deliver(channels)

    def deliver(self, channels: Sequence[Channel]) -> None:
        """Pass the steps of channels on. Call it in the loop's thread."""
        taken = [(channel, steps) for channel in channels if (steps := channel.take())]
        self._count([step for _, steps in taken for step in steps if step is not None])
        for channel, steps in taken:
            if steps[-1] is None:
                self._running.discard(channel)
            elif steps[0] is not None and steps[0].is_first:
                self._running.add(channel)
            channel.receive(_pieces(steps))
