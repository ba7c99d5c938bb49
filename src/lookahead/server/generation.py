"""The answers to one request while they are made: from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.core.statistics import StepRecord
from lookahead.server.errors import ApiError
from lookahead.server.metrics import FINISHED, FIRST_TOKEN, LEFT, PER_TOKEN, WHOLE, Metrics
from lookahead.server.plan import Plan, Tree, TreeWatcher
from lookahead.server.served_model import ServedModel
from lookahead.serving import RequestHandle
from lookahead.serving.handle import RequestStatistics, TokenEvent
from lookahead.text import TextBuilder


@dataclass
class Piece:
    """What one step added to an answer.

    Attributes:
        text: Text that is certain by now.
        tokens: Its tokens.
        nodes: Nodes that the step sent.
        tree: What the step proposed, if that was asked for.
        logprobs: What there is to say of the tokens, likewise.
    """

    text: str
    tokens: list[int]
    nodes: int
    tree: Tree | None
    logprobs: list[TokenEvent] = field(default_factory=list)


class Answer:
    """One answer.

    Args:
        served: The model.
        plan: What is asked for.
        index: Which answer of the request.
        seed: Of its random draws.
        tell: Takes each `Piece`, in the engine's thread.

    Attributes:
        handle: The engine's request, with its counts.
    """

    def __init__(self, served: ServedModel, plan: Plan, index: int, seed: int, tell: Callable[[Piece], None]) -> None:
        self.plan, self.index, self._tell = plan, index, tell
        self._builder = TextBuilder(served.tokenizer, plan.prompt, plan.request.stop, plan.dropped)
        self._watcher = TreeWatcher()
        self._read = 0  # tokens that were told
        processors, config = plan.steer(self._watcher)
        self.handle: RequestHandle = served.engine.submit(
            plan.prompt,
            seed=seed,
            lookahead_config=config,
            on_step=self._on_step,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([_StopText(self._builder)]),
            **plan.arguments,
        )

    @property
    def statistics(self) -> RequestStatistics:
        """Its counts."""
        return self.handle.statistics

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of the predicted text came, and how many did not."""
        expected = len(self.plan.arguments["prediction"] or ())
        came = min(self.statistics.predicted_tokens, expected)
        return came, expected - came

    def _on_step(self, record: StepRecord) -> None:
        text = self._builder.finish() if record.finished else self._builder.take()
        self._tell(Piece(text, record.tokens, record.nodes, self._watcher.tree))

    def add_logprobs(self, piece: Piece) -> None:
        """Tell in the next piece what there is to say of its tokens, if that was asked for."""
        if self.plan.arguments["logprobs"] is not None:
            events = self.handle.events_since(self._read)[: len(piece.tokens)]
            piece.logprobs = [event for event in events if event.token not in self.plan.ends]
        self._read += len(piece.tokens)


class _StopText(StoppingCriteria):  # type: ignore[misc]
    """Builds the text token by token, and ends it at a stop string."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([self._builder.add(int(input_ids[0, -1]))])


class Generation:
    """All answers to one request. Iterating gives each answer with its pieces, and with `None` at its end.

    Args:
        served: The model.
        metrics: What is counted and timed.
        seconds: Time that it has.
        ended: Called once when it is through.

    Attributes:
        answers: The answers, once `submit` was called.
    """

    def __init__(self, served: ServedModel, metrics: Metrics, seconds: float, ended: Callable[[], None]) -> None:
        self._served, self._metrics, self._ended = served, metrics, ended
        self._begin = time.monotonic()
        self._deadline = self._begin + seconds
        self._last: dict[int, float] = {}  # when each answer took its last step
        self._queue: asyncio.Queue[tuple[int, Piece | ApiError | None]] = asyncio.Queue()
        self._closed = False
        self._settled = False  # complete or failed: the client hears how it ended
        self.answers: list[Answer] = []

    def submit(self, plans: Sequence[Plan], count: int, loop: asyncio.AbstractEventLoop) -> None:
        """Hand answers to the engine, `count` for each plan. May be called in another thread than the loop's."""
        for place, plan in enumerate(plans):
            for number in range(count):
                index = place * count + number
                tell = partial(self._tell, loop, index)
                answer = Answer(self._served, plan, index, plan.seed + number, tell)
                self.answers.append(answer)
                answer.handle.add_done_callback(partial(tell, None))
                if self._closed:  # meanwhile
                    answer.handle.cancel()

    def close(self) -> None:
        """Give up what is not complete, from the next step on: the client has gone, or has what there is."""
        if not self._closed:
            self._closed = True
            if self.answers and not self._settled:
                self._metrics.count(LEFT)
            self._metrics.time(WHOLE, time.monotonic() - self._begin)
            self._ended()
        for answer in self.answers:
            answer.handle.cancel()

    def fail(self, error: ApiError) -> None:
        """Have the iteration end with an error, whatever there is still to come."""
        self._queue.put_nowait((0, error))

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, Piece | None]]:
        left = len(self.answers)
        while left:
            index, event = await self._next()
            answer = self.answers[index]
            if isinstance(event, Piece):
                self._count(index, event)
                answer.add_logprobs(event)
                yield answer, event
                continue
            self._settled = True
            if event is not None:
                raise event
            answer.handle.result()  # which raises what ended it early
            left -= 1
            self._settled = left == 0
            self._metrics.count(FINISHED, label=answer.handle.finish_reason)
            yield answer, None

    def _count(self, index: int, piece: Piece) -> None:
        """Count a step of an answer."""
        now, before, tokens = time.monotonic(), self._last.get(index), len(piece.tokens)
        self._last[index] = now
        self._metrics.step(tokens, piece.nodes)
        if before is None:
            self._metrics.time(FIRST_TOKEN, now - self._begin)
        else:
            for _ in range(tokens):
                self._metrics.time(PER_TOKEN, (now - before) / tokens)

    async def _next(self) -> tuple[int, Piece | ApiError | None]:
        try:
            return await asyncio.wait_for(self._queue.get(), max(self._deadline - time.monotonic(), 0.001))
        except asyncio.TimeoutError:
            return 0, ApiError(504, "the request took longer than this server allows", code="timeout")

    def _tell(self, loop: asyncio.AbstractEventLoop, index: int, piece: Piece | None) -> None:
        """Tell of a step of an answer, or of its end."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to listen
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))
