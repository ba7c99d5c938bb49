"""The answers to one request while they are made: from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
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
from lookahead.serving.handle import TokenEvent
from lookahead.text import TextBuilder


@dataclass
class Piece:
    """What one step added to an answer.

    Attributes:
        text: Text that is certain by now.
        tokens: Its tokens.
        nodes: Nodes that the step sent.
        place: Tokens of the answer before it.
        logprobs: What there is to say of the tokens, if that was asked for.
        tree: What the step proposed, likewise.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    nodes: int = 0
    place: int = 0
    logprobs: list[TokenEvent] = field(default_factory=list)
    tree: Tree | None = None


class Answer:
    """One answer.

    Args:
        served: The model.
        plan: What is asked for.
        index: Which answer of the request.
        seed: Of its random draws.
        tell: Takes each `Piece`, in the engine's thread.

    Attributes:
        finish_reason: `"stop"` or `"length"`, when it is complete.
        tokens: Tokens so far.
        steps: Steps so far.
        nodes: Nodes that these sent.
        accepted: How many steps that sent a draft had so many drafted tokens accepted.
        draft_tokens: Tokens of the drafts.
    """

    def __init__(self, served: ServedModel, plan: Plan, index: int, seed: int, tell: Callable[[Piece], None]) -> None:
        self.plan, self.index = plan, index
        self.finish_reason: str | None = None
        self.tokens = self.steps = self.nodes = self.draft_tokens = 0
        self.accepted: Counter[int] = Counter()
        self._builder = TextBuilder(served.tokenizer, plan.prompt, plan.stops, plan.dropped)
        self._watcher = TreeWatcher()
        self._tell = tell
        processors, config = plan.steer(self._watcher)
        self.handle: RequestHandle = served.engine.submit(
            plan.prompt,
            seed=seed,
            lookahead_config=config,
            on_step=self._on_step,
            prediction=plan.prediction,
            logprobs=plan.logprobs,
            attention_mask=torch.ones((1, len(plan.prompt)), dtype=torch.long),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([_StopText(self._builder)]),
            pad_token_id=next(iter(plan.ends), 0),
            **plan.inputs,
            **plan.options,
        )

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of the predicted text came, and how many did not."""
        expected = len(self.plan.prediction or ())
        came = min(self.handle.statistics.predicted_tokens, expected)
        return came, expected - came

    def _on_step(self, record: StepRecord) -> None:
        place, self.tokens = self.tokens, self.tokens + len(record.tokens)
        self.steps += 1
        self.nodes += record.nodes
        if record.nodes > 1:
            self.draft_tokens += record.nodes - 1
            self.accepted[max(len(record.tokens) - 1, 0)] += 1
        text = self._builder.finish() if record.finished else self._builder.take()
        if record.finished:
            ended = self._builder.stopped or record.tokens[-1] in self.plan.ends
            self.finish_reason = "stop" if ended else "length"
        self._tell(Piece(text, record.tokens, record.nodes, place, tree=self._watcher.tree))

    def add_logprobs(self, piece: Piece) -> None:
        """Tell in a piece what there is to say of its tokens, if that was asked for."""
        if self.plan.logprobs is not None:
            events = self.handle.events_since(piece.place)[: len(piece.tokens)]
            piece.logprobs = [event for event in events if event.token not in self.plan.ends]


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
        self._queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
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
        for watcher in self._watchers:
            watcher.cancel()

    def fail(self, error: ApiError) -> None:
        """Have the iteration end with an error, whatever there is still to come."""
        self._queue.put_nowait((0, error))

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, Piece | None]]:
        self._watchers = [asyncio.create_task(self._watch(answer)) for answer in self.answers]
        left = len(self.answers)
        while left:
            index, event = await self._next()
            answer = self.answers[index]
            if isinstance(event, Piece):
                self._count(index, event)
                answer.add_logprobs(event)
                yield answer, event
                continue
            if event is not None:
                self._settled = True
                raise event
            left -= 1
            self._settled = left == 0
            self._metrics.count(FINISHED, label=answer.finish_reason or "abort")
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

    async def _next(self) -> tuple[int, Piece | BaseException | None]:
        try:
            return await asyncio.wait_for(self._queue.get(), max(self._deadline - time.monotonic(), 0.001))
        except asyncio.TimeoutError:
            self._settled = True
            raise ApiError(504, "the request took longer than this server allows", code="timeout") from None

    def _tell(self, loop: asyncio.AbstractEventLoop, index: int, piece: Piece) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to listen
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

    async def _watch(self, answer: Answer) -> None:
        """Tell of the end. Behind the last piece: what the engine's thread told before is in the loop by then."""
        failed: BaseException | None = None
        try:
            await answer.handle.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failed = error
        asyncio.get_running_loop().call_soon(self._queue.put_nowait, (answer.index, failed))
