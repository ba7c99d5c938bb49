"""Handle of a submitted request: its tokens, result and statistics, and its cancellation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from time import perf_counter
from typing import Protocol

import torch

from lookahead.backends.base import Recorded
from lookahead.core.statistics import Statistics
from lookahead.serving.output import LookaheadOutput
from lookahead.values import check_callable, whole_number

Output = torch.Tensor | LookaheadOutput


@dataclass(frozen=True)
class TokenEvent:
    """New token of a request.

    Attributes:
        token: Token id.
        logprob: Natural logarithm of the model's probability, before processors and sampling settings; `None` if the
            request has no `logprobs`.
        top: Likeliest tokens at the same index with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepRunner(Protocol):
    """Runs the steps of requests: an `Engine`."""

    @property
    def started(self) -> bool:
        """Whether the engine's own thread runs the steps."""

    def check_process(self) -> None:
        """Refuse to run in a forked process."""

    def check_waiting(self) -> None:
        """Refuse to wait in a forked process, or within a step."""

    def step(self) -> int:
        """Run one step, and return the number of unfinished requests."""

    def wake(self) -> None:
        """Wake the thread after a change."""


class RequestHandle:
    """A request that was submitted to an `Engine`.

    `for token in handle` and `async for token in handle` yield new token ids as they arrive; `events()` adds
    log-probabilities in the same two ways. `result()` and `await handle.wait()` wait for the complete text. All of them
    run the engine's steps if it has no thread. Several readers may read at once; each starts at the first token.

    Args:
        engine: Engine that runs the steps.

    Attributes:
        finish_reason: `"stop"` (a token, text or criterion ended it), `"length"`, `"cancelled"` or `"error"`; `None`
            until it is done.
        cancelled: Whether it was cancelled; it is `done` after the next step.
        statistics: Counts and times of this request.
    """

    def __init__(self, engine: StepRunner) -> None:
        self._engine = engine
        self._submitted = perf_counter()
        self._changed = Condition()
        self._text: list[int] = []
        self._begin = self._end = 0  # of the new tokens so far, in the text
        self._events: list[TokenEvent] | None = None  # with their log-probabilities, if requested
        self._outcome: Future[Output] = Future()
        self._listeners: set[Callable[[], object]] = set()
        self._readers = 0  # waiting, or about to wait
        self.finish_reason: str | None = None
        self.cancelled = False
        self.statistics = RequestStatistics()

    @property
    def tokens(self) -> list[int]:
        """The new token ids so far."""
        return self._text[self._begin : self._end]

    @property
    def done(self) -> bool:
        """Whether the request is finished, failed or cancelled."""
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Cancel the request before its next step. It has no effect once the request is done."""
        if not self.done:
            self._engine.check_process()
            self.cancelled = True
            self._engine.wake()

    def result(self) -> Output:
        """Wait until the request is done.

        Returns:
            The text `[1, tokens]` int64 including the prompt, as `model.generate` returns it; or a `LookaheadOutput`
            with `return_dict_in_generate=True`.

        Raises:
            concurrent.futures.CancelledError: The request was cancelled.
            Exception: A processor, a stopping criterion, a streamer or the model raised it.
        """
        self._wait(math.inf)
        return self._outcome.result()

    async def wait(self) -> Output:
        """Wait like `result()`, but let other asyncio tasks run."""
        async for _ in self.events():
            pass
        return self._outcome.result()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the request is done, in the thread that ends it; at once if it is done already.

        Raises:
            InvalidArgumentError: `callback` is not callable without arguments.
        """
        check_callable("callback", callback, 0, "must be callable without arguments")
        self._outcome.add_done_callback(lambda _: callback())

    def events(self) -> TokenEvents:
        """Return an iterator over the new tokens, for `for` and for `async for`."""
        return TokenEvents(self)

    def __iter__(self) -> Iterator[int]:
        return (event.token for event in self.events())

    def __aiter__(self) -> AsyncIterator[int]:
        return (event.token async for event in self.events())

    def events_since(self, seen: int) -> list[TokenEvent]:
        """Return the new tokens so far from index `seen` on, without waiting.

        Raises:
            InvalidArgumentError: `seen` is not a whole number of at least 0.
        """
        seen = whole_number("seen", seen, 0)
        if self._events is not None:
            return self._events[seen:]
        return [TokenEvent(token) for token in self._text[self._begin + seen : self._end]]

    def _wait(self, count: float) -> bool:
        """Wait for more than `count` tokens or the end, and return whether there are more."""
        if not self.done:
            self._engine.check_waiting()
        while True:
            with self._changed:
                self._readers += 1  # before events are counted, so that `_notify` misses no reader
                try:
                    if self.done or self._end - self._begin > count:
                        return self._end - self._begin > count
                    if self._engine.started:
                        self._changed.wait()
                        continue
                finally:
                    self._readers -= 1
            self._engine.step()

    def follow(self, text: list[int], with_events: bool) -> None:
        """For the engine: `text` is the prompt, and steps will add tokens to it, with events or without."""
        self._text, self._begin = text, len(text)
        self._end = self._begin
        self._events = [] if with_events else None

    def serve(self) -> None:
        """Note the first step (called by the engine)."""
        if self.statistics.queue_seconds is None:
            self.statistics.queue_seconds = perf_counter() - self._submitted

    def add(self, nodes: int, tokens: int, events: Sequence[TokenEvent] = ()) -> None:
        """Add `tokens` tokens of the text, from a step of `nodes` nodes (called by the engine)."""
        statistics = self.statistics
        statistics.steps += 1
        statistics.tokens += tokens
        statistics.nodes_per_step.append(nodes)
        statistics.accepted_lengths.append(tokens)
        if statistics.first_token_seconds is None:
            statistics.first_token_seconds = perf_counter() - self._submitted
        if self._events is not None:
            self._events += events
        self._end += tokens
        if self._readers or self._listeners:
            self._notify()

    def end(self, output: Output | None, error: BaseException | None, reason: str) -> None:
        """Finish the request (called by the engine)."""
        self.statistics.total_seconds = perf_counter() - self._submitted
        self.finish_reason = reason  # `done` is true from here on
        try:
            if output is None:
                self._outcome.set_exception(error or CancelledError())
            else:
                self._outcome.set_result(output)
        finally:  # a callback may end with `SystemExit`
            self._notify()

    def _notify(self) -> None:
        """Wake all readers."""
        if self._readers:
            with self._changed:
                self._changed.notify_all()
        for listener in list(self._listeners):
            try:
                listener()
            except RuntimeError:  # its event loop is closed
                self._listeners.discard(listener)


class TokenEvents:
    """Tokens of a request, for `for` and `async for`. Each loop starts at the first token."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[TokenEvent]:
        handle = self._handle
        count = 0
        while handle._wait(count):
            new = handle.events_since(count)
            yield from new
            count += len(new)
        handle._outcome.result()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        handle = self._handle
        if not handle.done:
            handle._engine.check_waiting()
        count = 0
        changed = asyncio.Event()
        notify = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        handle._listeners.add(notify)
        try:
            while True:
                changed.clear()
                is_last = handle.done  # read before the events, so that none is missed
                new = handle.events_since(count)
                for event in new:
                    yield event
                count += len(new)
                if is_last:
                    break
                if handle._engine.started:
                    await changed.wait()
                else:
                    await asyncio.to_thread(handle._engine.step)
            handle._outcome.result()
        finally:
            handle._listeners.discard(notify)


@dataclass
class EngineStatistics:
    """Counts of an engine.

    Attributes:
        steps: Forward passes.
        rows: Sum of the rows of all passes.
        nodes: Nodes of all passes, without prompt tokens.
        tokens: Generated tokens.
        preempted: Number of preemptions of running requests for lack of memory.
        prompt_tokens: Prompt tokens, computed or reused.
        reused_tokens: Prompt tokens with keys and values of another text.
        graphs: Time and memory of captured CUDA graphs.
    """

    steps: int = 0
    rows: int = 0
    nodes: int = 0
    tokens: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    graphs: Recorded = field(default_factory=Recorded)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class EngineLoad:
    """The current load of an engine.

    Attributes:
        waiting: Number of waiting requests.
        running: Number of running requests.
        kv_bytes: Bytes of keys and values of running requests.
        prefix_bytes: Bytes of the prefix cache.
        kv_limit_bytes: Limit of both in bytes.
    """

    waiting: int
    running: int
    kv_bytes: int
    prefix_bytes: int
    kv_limit_bytes: int | None = None

    @property
    def most_kv_bytes(self) -> int | None:
        """Former name of `kv_limit_bytes`."""
        return self.kv_limit_bytes


@dataclass
class RequestStatistics(Statistics):
    """Counts and times of one request; `seconds` is empty, because steps are shared.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Prompt tokens with keys and values of another text.
        predicted_tokens: Tokens of the output that `prediction` predicted.
        queue_seconds: Seconds from `submit` to its first step; `None` until then.
        first_token_seconds: Seconds from `submit` to the first token; `None` until then.
        total_seconds: Seconds from `submit` to the end; `None` until then.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    predicted_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None
