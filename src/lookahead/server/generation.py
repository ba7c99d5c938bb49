"""The answers to one request while they are made: from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.core.statistics import StepRecord
from lookahead.server.errors import CLIENT_LEFT, ApiError
from lookahead.server.grammar import asks_for_json
from lookahead.server.guard import ServerSettings
from lookahead.server.metrics import FINISHED, FIRST_TOKEN, LEFT, PER_TOKEN, WHOLE, Metrics
from lookahead.server.plan import Plan, make_plan
from lookahead.server.requests import ChoicesRequest, CompletionRequest
from lookahead.server.scoring import scored
from lookahead.server.served_model import ServedModel
from lookahead.server.tools import ReasoningFormat
from lookahead.serving import RequestHandle
from lookahead.serving.handle import TokenEvent
from lookahead.text import TextBuilder
from lookahead.trace import Trace, TracedStep

_LAST_TOKENS = 256
"""Tokens of a faulty answer that are told."""


@dataclass
class Piece:
    """What one step added to an answer.

    Attributes:
        text: Text that is certain by now.
        tokens: How many tokens it added.
        nodes: Nodes that the step sent.
        step: What the step proposed, if that was asked for.
        logprobs: What there is to say of the tokens, likewise.
    """

    text: str = ""
    tokens: int = 0
    nodes: int = 0
    step: TracedStep | None = None
    logprobs: list[TokenEvent] = field(default_factory=list)


class Answer:
    """One answer, of which `tell` takes each `Piece` in the engine's thread.

    Attributes:
        index: Which answer of the request.
        handle: The engine's request, with its counts.
    """

    def __init__(
        self, served: ServedModel, plan: Plan, index: int, seed: int, group: object, tell: Callable[[Piece], None]
    ) -> None:
        self.plan, self.index, self._tell = plan, index, tell
        self._builder = TextBuilder(served.tokenizer, plan.prompt, plan.request.stop, plan.dropped)
        self._trace = Trace() if plan.request.lookahead.steps else None
        self._read = 0  # tokens that were told
        processors, config = plan.steer()
        self.handle: RequestHandle = served.engine.submit(
            plan.prompt,
            seed=seed,
            group=group,
            lookahead_config=config if self._trace is None else replace(config, trace=self._trace),
            on_step=self._on_step,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([_StopText(self._builder)]),
            **plan.arguments,
        )

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of the predicted text came, and how many did not."""
        expected = len(self.plan.arguments["prediction"] or ())
        came = min(self.handle.statistics.predicted_tokens, expected)
        return came, expected - came

    def _on_step(self, record: StepRecord) -> None:
        text = self._builder.finish() if record.finished else self._builder.take()
        step = None if self._trace is None else self._trace.texts[0].steps.pop()
        self._tell(Piece(text, len(record.tokens), record.nodes, step))

    @property
    def text(self) -> str:
        """The text so far."""
        return self._builder.text

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._builder.stop

    @property
    def is_cut(self) -> bool:
        """Whether it ended where the request has it end, whatever the text is."""
        is_full = len(self.handle.tokens) >= self.plan.arguments["max_new_tokens"]
        return self._builder.stopped or is_full or self.handle.finish_reason not in ("stop", "length")

    def add_logprobs(self, piece: Piece) -> None:
        """Tell in the next piece what there is to say of its tokens, if that was asked for."""
        if self.plan.arguments["logprobs"] is not None:
            events = self.handle.events_since(self._read)[: piece.tokens]
            piece.logprobs = [event for event in events if event.token not in self.plan.ends]
        self._read += piece.tokens


class _StopText(StoppingCriteria):  # type: ignore[misc]
    """Builds the text token by token, and ends it at a stop string."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([self._builder.add(int(input_ids[0, -1]))])


class Generation:
    """All answers to one request. Iterating gives each answer with its pieces, and with `None` at its end.

    Args:
        settings: What may be asked for, and for how long.
        ended: Called once when it is through.

    Attributes:
        plans: One for each prompt, once `prepare` was called.
        scored: The tokens of each prompt with their log-probabilities, if these were asked for.
        answers: The answers, once `submit` was; `request.n` for each plan.
    """

    def __init__(
        self,
        served: ServedModel,
        request: ChoicesRequest,
        settings: ServerSettings,
        metrics: Metrics,
        ended: Callable[[], None],
    ) -> None:
        self.served, self.request = served, request
        self._settings, self._metrics, self._ended = settings, metrics, ended
        self._begin = time.monotonic()
        self._last: dict[int, float] = {}  # when each answer took its last step
        self._queue: asyncio.Queue[tuple[int, Piece | ApiError | None]] = asyncio.Queue()
        self._closed = False
        self._settled = False  # complete or failed: the client hears how it ended
        self.plans: list[Plan] = []
        self.scored: list[list[TokenEvent]] = []
        self.answers: list[Answer] = []

    def prepare(self, images: Sequence[bytes]) -> None:
        """Make the plans; `images` are the files of those of the request. For another thread than the loop's.

        Raises:
            LookaheadError: The request asks for what cannot be done.
        """
        prompts = self.served.prompts(self.request, images)
        for prompt in prompts:
            grammar = self.plans[0].grammar if self.plans else None
            self.plans.append(make_plan(self.served, self.request, prompt, self._settings, grammar))
            if isinstance(self.request, CompletionRequest) and self.request.echo and self.request.logprobs is not None:
                self.scored.append(scored(self.served, prompt.tokens, self.request.logprobs))

    def submit(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        """Hand an answer to the engine, of which `index` have been before. May be called in another thread than the
        loop's.

        Raises:
            LookaheadError: The request asks for what cannot be done.
        """
        place, number = divmod(index, self.request.n)
        plan, tell = self.plans[place], partial(self._tell, loop, index)
        answer = Answer(self.served, plan, index, plan.seed + number, self, tell)
        self.answers.append(answer)
        answer.handle.add_done_callback(partial(tell, None))
        if self._closed:  # meanwhile
            answer.handle.cancel()

    @property
    def seconds_left(self) -> float:
        """Seconds until it is given up; none are left where it is negative."""
        return self._begin + self._settings.timeout - time.monotonic()

    def close(self) -> None:
        """Give up what is not complete, from the next step on: the client has gone, or has what there is."""
        if not self._closed:
            self._closed = True
            if self.answers and not self._settled:
                self._metrics.count(self.served.name, LEFT)
            self._metrics.time(self.served.name, WHOLE, time.monotonic() - self._begin)
            self._ended()
        for answer in self.answers:
            answer.handle.cancel()

    def fail(self, error: ApiError) -> None:
        """Have the iteration end with an error, whatever there is still to come."""
        self._queue.put_nowait((0, error))

    def faulty(self) -> list[dict[str, Any]]:
        """What there is to say of answers that ought to be JSON and are none, though nothing has cut them."""
        if not asks_for_json(self.request):
            return []
        return [
            {
                "index": answer.index,
                "finish_reason": answer.handle.finish_reason,
                "steps": answer.handle.statistics.steps,
                "token_ids": answer.handle.tokens[-_LAST_TOKENS:],
            }
            for answer in self.answers
            if not answer.is_cut and not _is_json(answer.text, self.served.reasoning)
        ]

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
            self._settled = event is None or event.status_code != CLIENT_LEFT
            if event is not None:
                raise event
            answer.handle.result()  # which raises what ended it early
            left -= 1
            self._settled = left == 0
            self._metrics.count(self.served.name, FINISHED, 1, answer.handle.finish_reason or "")
            yield answer, None

    def _count(self, index: int, piece: Piece) -> None:
        """Count a step of an answer."""
        now, before = time.monotonic(), self._last.get(index)
        self._last[index] = now
        self._metrics.step(self.served.name, piece.tokens, piece.nodes)
        if before is None:
            self._metrics.time(self.served.name, FIRST_TOKEN, now - self._begin)
        else:
            for _ in range(piece.tokens):
                self._metrics.time(self.served.name, PER_TOKEN, (now - before) / piece.tokens)

    async def _next(self) -> tuple[int, Piece | ApiError | None]:
        if (left := self.seconds_left) > 0:  # also where there is more to tell, which a client is slow to take
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._queue.get(), left)
        return 0, ApiError(504, "the request took longer than this server allows", code="timeout")

    def _tell(self, loop: asyncio.AbstractEventLoop, index: int, piece: Piece | None) -> None:
        """Tell of a step of an answer, or of its end."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to listen
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))


def _is_json(text: str, reasoning: ReasoningFormat) -> bool:
    """Whether a text is JSON, reasoning before it left out."""
    for mark in ("", reasoning.end, reasoning.answer):
        with suppress(ValueError, RecursionError):
            json.loads(text.rpartition(mark)[2] if mark else text)
            return True
    return False
