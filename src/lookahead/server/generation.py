"""The answers to one request while they are made: from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.core.statistics import StepRecord
from lookahead.server.errors import CLIENT_LEFT, ApiError
from lookahead.server.grammar import asks_for_json
from lookahead.server.guard import ServerSettings
from lookahead.server.metrics import FINISHED, LEFT, WHOLE, Metrics
from lookahead.server.outbox import Outbox, Piece
from lookahead.server.plan import Plan, make_plan
from lookahead.server.requests import ChoicesRequest, CompletionRequest
from lookahead.server.scoring import scored
from lookahead.server.served_model import ServedModel
from lookahead.server.tools import ReasoningFormat
from lookahead.serving import RequestHandle
from lookahead.serving.handle import TokenEvent
from lookahead.text import TextBuilder
from lookahead.trace import Trace

_LAST_TOKENS = 256
"""Tokens of a faulty answer that are told."""


class Answer:
    """One answer.

    Args:
        begin: When the request arrived, in seconds of `time.monotonic`.
        send: Called in the engine's thread with the `Piece` of each step.

    Attributes:
        index: Index of the answer in its request.
        handle: The engine's request, with its counts.
        complete: Whether all of its text was read.
        first_token_seconds: Time from the request to the first token; `None` before there is one.
    """

    def __init__(
        self,
        served: ServedModel,
        plan: Plan,
        index: int,
        seed: int,
        group: object,
        begin: float,
        send: Callable[[Piece], None],
    ) -> None:
        self.plan, self.index, self._last, self._send = plan, index, begin, send
        self.complete = False
        self.first_token_seconds: float | None = None
        self._builder = self._new_builder(served)
        self._trace = Trace() if plan.request.lookahead.steps else None
        self._read = 0  # number of tokens read
        processors, config = plan.steer()
        criteria = [_StopText(self._new_builder(served))] if plan.request.stop else []
        self.handle: RequestHandle = served.engine.submit(
            plan.prompt,
            seed=seed,
            group=group,
            lookahead_config=config if self._trace is None else replace(config, trace=self._trace),
            on_step=self._on_step,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList(criteria),
            **plan.arguments,
        )

    def _new_builder(self, served: ServedModel) -> TextBuilder:
        return TextBuilder(served.decoder, self.plan.prompt, self.plan.request.stop, self.plan.dropped)

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of the predicted text came, and how many did not."""
        expected = len(self.plan.arguments["prediction"] or ())
        came = min(self.handle.statistics.predicted_tokens, expected)
        return came, expected - came

    def _on_step(self, record: StepRecord) -> None:
        step = None if self._trace is None else self._trace.texts[0].steps.pop()
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        is_first = self.first_token_seconds is None
        if is_first:
            self.first_token_seconds = seconds
        self._send(Piece(list(record.tokens), record.nodes, record.finished, seconds, is_first, step))

    def read(self, piece: Piece) -> None:
        """Add text and log-probabilities to a piece. Pieces must come in order."""
        self._builder.extend(piece.tokens)
        piece.text = self._builder.finish() if piece.finished else self._builder.take()
        self.complete = piece.finished
        if self.plan.arguments["logprobs"] is not None:
            events = self.handle.events_since(self._read)[: len(piece.tokens)]
            piece.logprobs = [event for event in events if event.token not in self.plan.ends]
        self._read += len(piece.tokens)

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
        return (
            self._builder.stopped or is_full or not self.complete or self.handle.finish_reason not in ("stop", "length")
        )


class _StopText(StoppingCriteria):  # type: ignore[misc]
    """Ends a text at a stop string."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([self._builder.add(int(input_ids[0, -1]))])


class Generation:
    """All answers to one request. Iterating gives lists of answers with a piece each, or with `None` at their end.

    Args:
        settings: Limits of requests.
        outbox: Passes pieces to the event loop.
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
        outbox: Outbox,
        ended: Callable[[], None],
    ) -> None:
        self.served, self.request = served, request
        self._settings, self._metrics, self._outbox, self._ended = settings, metrics, outbox, ended
        self._begin = time.monotonic()
        self._pieces: list[tuple[int, Piece | None]] = []
        self._failure: ApiError | None = None
        self._has_news = asyncio.Event()
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
        plan, send = self.plans[place], partial(self._outbox.put, loop, partial(self._receive, index))
        answer = Answer(self.served, plan, index, plan.seed + number, self, self._begin, send)
        self.answers.append(answer)
        answer.handle.add_done_callback(partial(send, None))
        if self._closed:  # meanwhile
            answer.handle.cancel()

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._begin

    @property
    def seconds_left(self) -> float:
        """Seconds until it is given up; none are left where it is negative."""
        return self._settings.timeout - self.seconds

    def close(self) -> None:
        """Give up what is not complete, from the next step on: the client has gone, or has what there is."""
        if not self._closed:
            self._closed = True
            if self.answers and not self._settled:
                self._metrics.count(self.served.name, LEFT)
            self._metrics.time(self.served.name, WHOLE, self.seconds)
            self._ended()
        for answer in self.answers:
            answer.handle.cancel()

    def fail(self, error: ApiError) -> None:
        """Have the iteration end with an error."""
        self._failure = self._failure or error
        self._has_news.set()

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

    async def __aiter__(self) -> AsyncIterator[list[tuple[Answer, Piece | None]]]:
        timeout = ApiError(504, "the request took longer than this server allows", code="timeout")
        timer = asyncio.get_running_loop().call_later(max(self.seconds_left, 0), self.fail, timeout)
        try:
            left = len(self.answers)
            while left:
                await self._has_news.wait()
                self._has_news.clear()
                if self._failure is not None:
                    self._settled = self._failure.status_code != CLIENT_LEFT
                    raise self._failure
                pieces, self._pieces = self._pieces, []
                for index, piece in pieces:
                    if piece is None:
                        self.answers[index].handle.result()  # raises the error that ended it early
                        left -= 1
                        self._settled = left == 0
                    else:
                        self.answers[index].read(piece)
                yield [(self.answers[index], piece) for index, piece in pieces]
        finally:
            timer.cancel()

    def _receive(self, index: int, piece: Piece | None) -> None:
        """Take a step of an answer, or its end."""
        if piece is None:
            self._metrics.count(self.served.name, FINISHED, 1, self.answers[index].handle.finish_reason or "")
        if self._pieces and piece is not None and piece.step is None:
            before, last = self._pieces[-1]
            if before == index and last is not None:
                last.add(piece)
                return
        self._pieces.append((index, piece))
        if piece is None or self.request.stream:
            self._has_news.set()


def _is_json(text: str, reasoning: ReasoningFormat) -> bool:
    """Whether a text is JSON, reasoning before it left out."""
    for mark in ("", reasoning.end, reasoning.answer):
        with suppress(ValueError, RecursionError):
            json.loads(text.rpartition(mark)[2] if mark else text)
            return True
    return False
