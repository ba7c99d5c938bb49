"""Running answers to one request: from the engine's thread to the event loop."""

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
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from lookahead.backends.transformers.cache_names import CACHE, cache_name
from lookahead.core.statistics import StepRecord
from lookahead.server.errors import CLIENT_CLOSED_REQUEST, ApiError, refused
from lookahead.server.grammar import requires_json
from lookahead.server.guard import ServerSettings
from lookahead.server.metrics import DISCONNECTED, FINISHED, WHOLE, Metrics
from lookahead.server.outbox import AnswerStep, Channel, Outbox, Piece
from lookahead.server.plan import Plan, make_plan
from lookahead.server.requests import ChoicesRequest, CompletionRequest
from lookahead.server.served_model import ServedModel
from lookahead.server.tools import ReasoningFormat
from lookahead.serving import RequestHandle
from lookahead.serving.handle import TokenEvent
from lookahead.text import TextBuilder
from lookahead.trace import Trace

_LAST_TOKENS = 256
"""Last tokens of an invalid JSON answer that the log contains."""


class Answer:
    """One running answer.

    Args:
        served: The model.
        plan: Plan of its prompt.
        index: Index of the answer in its request.
        seed: Seed of sampling.
        group: Group of the request in the engine.
        begin: Arrival of the request, in seconds of `time.monotonic`.
        send: Called in the engine's thread with each step.

    Attributes:
        index: Index of the answer in its request.
        handle: Request in the engine.
        builder: Text so far, and the stop string that ended it, if any.
        complete: Whether the whole text was read.
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
        send: Callable[[AnswerStep], None],
    ) -> None:
        self.plan = plan
        self.index = index
        self._last = begin  # time of the last step
        self._send = send
        self.complete = False
        self.first_token_seconds: float | None = None
        self.builder = self._new_builder(served)
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
        """Numbers of accepted and of rejected tokens of the predicted text."""
        tokens = len(self.plan.arguments["prediction"] or ())
        accepted = min(self.handle.statistics.predicted_tokens, tokens)
        return accepted, tokens - accepted

    def _on_step(self, record: StepRecord) -> None:
        trace = None if self._trace is None else self._trace.texts[0].steps.pop()
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        is_first = self.first_token_seconds is None
        if is_first:
            self.first_token_seconds = seconds
        self._send(AnswerStep(record.tokens, record.nodes, record.finished, seconds, is_first, trace))

    def read(self, piece: Piece) -> None:
        """Add text and log-probabilities to a piece. Pieces must come in order."""
        self.builder.extend(piece.tokens)
        piece.text = self.builder.finish() if piece.finished else self.builder.take()
        self.complete = piece.finished
        if self.plan.arguments["logprobs"] is not None:
            events = self.handle.events_since(self._read)[: len(piece.tokens)]
            piece.logprobs = [event for event in events if event.token not in self.plan.ends]
        self._read += len(piece.tokens)

    @property
    def is_cut(self) -> bool:
        """Whether a limit, a stop string or an error ended the text, rather than the model."""
        is_full = len(self.handle.tokens) >= self.plan.arguments["max_new_tokens"]
        return (
            self.builder.stopped or is_full or not self.complete or self.handle.finish_reason not in ("stop", "length")
        )


class _StopText(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion for stop strings."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([self._builder.add(int(input_ids[0, -1]))])


class Generation:
    """All answers to one request. Iteration yields lists of pairs: an answer, and a piece or `None` at its end.

    Args:
        served: The model.
        request: The request.
        settings: Limits of the request.
        metrics: Metrics to update.
        outbox: Passes pieces to the event loop.
        on_end: Called once, when all answers are complete or cancelled.

    Attributes:
        tenant: Tenant of the request; see `Engine.submit`.
        plans: One plan for each prompt, after `prepare`.
        prompt_scores: Tokens of each prompt with their log-probabilities, if requested.
        answers: `request.n` answers for each plan, after `submit`.
        write: Called with an answer and new pieces while the iteration waits, if set. The iteration yields them only if
            it returns false.
    """

    def __init__(
        self,
        served: ServedModel,
        request: ChoicesRequest,
        settings: ServerSettings,
        metrics: Metrics,
        outbox: Outbox,
        on_end: Callable[[], None],
    ) -> None:
        self.served = served
        self.request = request
        self._settings = settings
        self._metrics = metrics
        self._outbox = outbox
        self._on_end = on_end
        self._begin = time.monotonic()
        self._pieces: list[tuple[int, Piece | None]] = []
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()
        self._waits = False  # whether the iteration waits for pieces
        self._closed = False
        self._settled = False  # complete or failed: the client did not leave early
        self.tenant: int | None = None
        self.plans: list[Plan] = []
        self.prompt_scores: list[list[TokenEvent]] = []
        self.answers: list[Answer] = []
        self.write: Callable[[Answer, Sequence[Any]], bool] | None = None

    def prepare(self, images: Sequence[bytes]) -> None:
        """Make the plans from the request and its image files. Call it outside the event loop's thread.

        Raises:
            LookaheadError: The request is invalid.
        """
        for prompt in self.served.prompts(self.request, images):
            grammar = self.plans[0].grammar if self.plans else None
            self.plans.append(make_plan(self.served, self.request, prompt, self._settings, grammar))
            self.plans[-1].arguments["tenant"] = self.tenant
            if isinstance(self.request, CompletionRequest) and self.request.echo and self.request.logprobs is not None:
                self.prompt_scores.append(score_prompt(self.served, prompt.tokens, self.request.logprobs))

    def submit(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        """Submit answer number `index` to the engine. Any thread may call it.

        Raises:
            LookaheadError: The request is invalid.
        """
        prompt, number = divmod(index, self.request.n)
        plan = self.plans[prompt]
        channel = Channel(self._outbox, loop, partial(self._receive, index), self.request.stream)
        answer = Answer(self.served, plan, index, plan.seed + number, self, self._begin, channel.put)
        self.answers.append(answer)
        answer.handle.add_done_callback(partial(channel.put, None))
        if self._closed:
            answer.handle.cancel()

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._begin

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the timeout; negative after it."""
        return self._settings.timeout - self.seconds

    def close(self) -> None:
        """Cancel incomplete answers at their next step."""
        if not self._closed:
            self._closed = True
            if self.answers and not self._settled:
                self._metrics.count(self.served.name, DISCONNECTED)
            self._metrics.time(self.served.name, WHOLE, self.seconds)
            self._on_end()
        for answer in self.answers:
            answer.handle.cancel()

    def fail(self, error: Exception) -> None:
        """End the iteration with an error."""
        self._failure = self._failure or error
        self._has_news.set()

    def invalid_json(self) -> list[dict[str, Any]]:
        """Describe complete answers that should be JSON and are not, for the log."""
        if not requires_json(self.request):
            return []
        return [
            {
                "index": answer.index,
                "finish_reason": answer.handle.finish_reason,
                "steps": answer.handle.statistics.steps,
                "token_ids": answer.handle.tokens[-_LAST_TOKENS:],
            }
            for answer in self.answers
            if not answer.is_cut and not _is_json(answer.builder.text, self.served.reasoning)
        ]

    async def __aiter__(self) -> AsyncIterator[list[tuple[Answer, Piece | None]]]:
        message = f"the request took longer than this server allows ({self._settings.timeout:g} s, --timeout)"
        timeout = ApiError(504, message, code="timeout")
        timer = asyncio.get_running_loop().call_later(max(self.remaining_seconds, 0), self.fail, timeout)
        try:
            running = len(self.answers)
            while running:
                self._waits = True
                await self._has_news.wait()
                self._waits = False
                self._has_news.clear()
                if self._failure is not None:
                    self._settled = getattr(self._failure, "status_code", None) != CLIENT_CLOSED_REQUEST
                    raise self._failure
                pieces = self._pieces
                self._pieces = []
                for index, piece in pieces:
                    if piece is None:
                        self.answers[index].handle.result()  # raises the error of the answer, if any
                        running -= 1
                        self._settled = running == 0
                    else:
                        self.answers[index].read(piece)
                yield [(self.answers[index], piece) for index, piece in pieces]
        finally:
            timer.cancel()

    def _receive(self, index: int, pieces: Sequence[Piece | None]) -> None:
        """Receive pieces of an answer, or its end."""
        if self._waits and not self._has_news.is_set() and self.write is not None and pieces[-1] is not None:
            try:
                if self.write(self.answers[index], pieces):
                    return
            except Exception as error:
                self.fail(error)
                return
        for piece in pieces:
            if piece is None:
                self._metrics.count(self.served.name, FINISHED, 1, self.answers[index].handle.finish_reason or "")
            if self._pieces and piece is not None and piece.trace is None:
                before, last = self._pieces[-1]
                if before == index and last is not None:
                    last.add(piece)
                    continue
            self._pieces.append((index, piece))
        if self.request.stream or pieces[-1] is None:
            self._has_news.set()


def _is_json(text: str, reasoning: ReasoningFormat) -> bool:
    """Return whether a text is JSON, after its reasoning."""
    for mark in ("", reasoning.end, reasoning.answer):
        with suppress(ValueError, RecursionError):
            json.loads(text.rpartition(mark)[2] if mark else text)
            return True
    return False


_PART = 256
"""Tokens of a pass: bounds the memory for logits."""


@torch.inference_mode()
def score_prompt(served: ServedModel, tokens: Sequence[int], alternatives: int) -> list[TokenEvent]:
    """Return the tokens of a prompt with their log-probabilities; the first token has none.

    It runs the model directly, beside the engine.

    Args:
        served: The model.
        tokens: The prompt.
        alternatives: Number of likeliest tokens to return at each index.

    Raises:
        ApiError: The model is none of transformers.
    """
    if not served.is_transformers:
        raise refused("echo", "echo with logprobs is supported for models of transformers only; leave one of them out")
    model: Any = served.model
    in_parts = not getattr(model, "_is_stateful", False) and cache_name(model) == CACHE
    options: dict[str, Any] = {"use_cache": False}
    if in_parts:
        options = {"use_cache": True, CACHE: DynamicCache(config=model.config.get_text_config())}
    events, size = [TokenEvent(tokens[0])], _PART if in_parts else len(tokens)
    for start in range(0, len(tokens), size):
        part = torch.tensor([tokens[start : start + size]], device=model.device)
        logits = model(part, **options).logits[0]
        following = tokens[len(events) : len(events) + len(logits)]  # the last logits have no token
        logprobs = logits[: len(following)].float().log_softmax(-1)
        values, ids = (each.tolist() for each in logprobs.topk(alternatives))
        for index, token in enumerate(following):
            top = tuple(zip(ids[index], values[index], strict=True))
            events.append(TokenEvent(token, float(logprobs[index, token]), top))
    return events
