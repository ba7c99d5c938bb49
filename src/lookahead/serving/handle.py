"""What the caller has of a request: its tokens as they come, its result, its counts, and the way to give it up."""

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
    """A token of a request.

    Attributes:
        token: Its id.
        logprob: Natural logarithm of its probability, as the model gave it, before processors and sampling settings;
            `None` if the request did not ask for `logprobs`.
        top: The likeliest tokens in its place with theirs, likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepRunner(Protocol):
    """Runs the steps of requests: an `Engine`."""

    @property
    def started(self) -> bool:
        """Whether a thread of its own runs the steps."""

    def check_process(self) -> None:
        """Refuse to run in a forked process."""

    def step(self) -> int:
        """Run one step; return the number of requests that are not finished."""

    def wake(self) -> None:
        """Let the thread look at what has changed."""


class RequestHandle:
    """A request that was submitted to an `Engine`.

    `for token in handle` and `async for token in handle` give the new token ids as they come, `events()` gives
    them with log-probabilities in the same two ways, `result()` waits for all of them, and so does `await
    handle.wait()`. Where the engine has no thread of its own, these run its steps. Any number of readers may read,
    each from the first token on.

    Args:
        engine: Who runs the steps.

    Attributes:
        finish_reason: Why it is done: `"stop"` (a token, a text or a criterion that ends it), `"length"`,
            `"cancelled"`, `"error"`; `None` before.
        cancelled: Whether it was cancelled; `done` follows with the next step.
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
        self._readers = 0  # that wait, or are about to
        self.finish_reason: str | None = None
        self.cancelled = False
        self.statistics = RequestStatistics()

    @property
    def tokens(self) -> list[int]:
        """The new token ids so far."""
        return self._text[self._begin : self._end]

    @property
    def done(self) -> bool:
        """Whether it is finished, failed or cancelled."""
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Cancel the request: it takes part in no further step. No effect once it is done."""
        if not self.done:
            self._engine.check_process()
            self.cancelled = True
            self._engine.wake()

    def result(self) -> Output:
        """Wait until the request is done.

        Returns:
            What `model.generate` returns: the text `[1, tokens]` int64, prompt included; or a `LookaheadOutput` with
            `return_dict_in_generate=True`.

        Raises:
            concurrent.futures.CancelledError: It was cancelled.
            Exception: What a processor, a stopping criterion, a streamer or the model raised.
        """
        self._wait(math.inf)
        return self._outcome.result()

    async def wait(self) -> Output:
        """`result()` for asyncio: other tasks run meanwhile."""
        async for _ in self.events():
            pass
        return self._outcome.result()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once it is done, in the thread that ends it; at once if it is done.

        Raises:
            InvalidArgumentError: It is not callable.
        """
        check_callable("callback", callback, 0, "must be callable without arguments")
        self._outcome.add_done_callback(lambda _: callback())

    def events(self) -> TokenEvents:
        """The new tokens as they come, for `for` and for `async for`."""
        return TokenEvents(self)

    def __iter__(self) -> Iterator[int]:
        return (event.token for event in self.events())

    def __aiter__(self) -> AsyncIterator[int]:
        return (event.token async for event in self.events())

    def events_since(self, seen: int) -> list[TokenEvent]:
        """The new tokens so far, without the first `seen`; does not wait.

        Raises:
            InvalidArgumentError: `seen` is no whole number, or below 0.
        """
        seen = whole_number("seen", seen, 0)
        if self._events is not None:
            return self._events[seen:]
        return [TokenEvent(token) for token in self._text[self._begin + seen : self._end]]

    def _wait(self, seen: float) -> bool:
        """Wait for more than `seen` tokens, or for the end; whether there are more."""
        if not self.done:
            self._engine.check_process()
        while True:
            with self._changed:
                self._readers += 1  # before the look at events: who adds some later sees that somebody waits
                try:
                    if self.done or self._end - self._begin > seen:
                        return self._end - self._begin > seen
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
        """For the engine: the request takes part in a step."""
        if self.statistics.queue_seconds is None:
            self.statistics.queue_seconds = perf_counter() - self._submitted

    def add(self, nodes: int, tokens: int, events: Sequence[TokenEvent] = ()) -> None:
        """For the engine: a step of `nodes` nodes has added `tokens` tokens to the text."""
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
        """For the engine: the request is done."""
        self.statistics.total_seconds = perf_counter() - self._submitted
        self.finish_reason = reason  # from here on it is done
        if output is None:
            self._outcome.set_exception(error or CancelledError())
        else:
            self._outcome.set_result(output)
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits."""
        if self._readers:
            with self._changed:
                self._changed.notify_all()
        for listener in list(self._listeners):
            try:
                listener()
            except RuntimeError:  # its event loop is closed
                self._listeners.discard(listener)


class TokenEvents:
    """The tokens of a request, for `for` and for `async for`; each loop begins with the first one."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[TokenEvent]:
        handle, seen = self._handle, 0
        while handle._wait(seen):
            new = handle.events_since(seen)
            yield from new
            seen += len(new)
        handle._outcome.result()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        handle = self._handle
        if not handle.done:
            handle._engine.check_process()
        seen, loop, changed = 0, asyncio.get_running_loop(), asyncio.Event()
        notify = partial(loop.call_soon_threadsafe, changed.set)
        handle._listeners.add(notify)
        try:
            while True:
                changed.clear()
                done, new = handle.done, handle.events_since(seen)  # in this order, so that no token is missed
                for event in new:
                    yield event
                seen += len(new)
                if done:
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
        rows: Rows served, over all of them.
        nodes: Nodes sent, prompt tokens not counted.
        tokens: Tokens generated.
        preempted: How often a running request had to wait again for want of memory.
        prompt_tokens: Tokens of the texts that requests began with, computed or reused.
        reused_tokens: Those whose keys and values another text had.
        graphs: What capturing CUDA graphs took so far.
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
        waiting: Requests that wait for their turn.
        running: Requests that run.
        kv_bytes: Bytes of keys and values that running requests hold.
        prefix_bytes: Bytes of those that are kept for requests that begin alike.
        most_kv_bytes: Most bytes of both; any number if `None`.
    """

    waiting: int
    running: int
    kv_bytes: int
    prefix_bytes: int
    most_kv_bytes: int | None = None


@dataclass
class RequestStatistics(Statistics):
    """Counts and times of one request; `seconds` stays empty, as steps are shared.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those whose keys and values another text had.
        predicted_tokens: Tokens of the output that were where `prediction` had them.
        queue_seconds: From `submit` to the first step that it takes part in; `None` before that.
        first_token_seconds: From `submit` to the first token; `None` before there is one.
        total_seconds: From `submit` to the end; `None` before it.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    predicted_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None
