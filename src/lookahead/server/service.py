"""The service behind the routes: from a parsed request to the response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from traceback import format_exception
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from lookahead.server import errors
from lookahead.server.answers import AnswerForm
from lookahead.server.errors import CLIENT_CLOSED_REQUEST, CLOSE, FAILED, ApiError, as_api_error, error_summary
from lookahead.server.generation import Answer, Generation
from lookahead.server.guard import ServerSettings
from lookahead.server.images import read_images
from lookahead.server.log import write_line
from lookahead.server.metrics import PROMPT_TOKENS, Metrics
from lookahead.server.outbox import Outbox, Piece
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest, Message
from lookahead.server.served_model import ServedModel
from lookahead.server.tracing import Tracing

_RETRY_AFTER = 2
"""Seconds until a refused client should try again, for the header `Retry-After`."""

_UNREAD = 1.0
"""Seconds for a client to read the timeout error, before its answers are cancelled."""

_SHORT = 2**16
"""Smallest body that counts as slow to prepare, in bytes. Grammars and images are always slow."""

_PREPARED_AT_ONCE = 4
"""Slow requests that are prepared at once."""


class Service:
    """Models, limits and metrics of a server, and the answers to its requests.

    Attributes:
        models: Served models by name.
        metrics: Metrics for Prometheus.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self.models = {served.name: served for served in models}
        self.metrics = Metrics({served.name: served.engine for served in models})
        self._settings = settings
        self._outboxes = {name: Outbox(partial(self.metrics.steps, name)) for name in self.models}
        self._running: set[Generation] = set()
        self._places = 0  # occupied by running and waiting answers, and by requests without an answer
        self._stopped: ApiError | None = None
        self._preparing = ThreadPoolExecutor(1, "lookahead-prepare")
        self._preparing_long = ThreadPoolExecutor(_PREPARED_AT_ONCE, "lookahead-prepare-long")
        self._seeing = asyncio.Semaphore(_PREPARED_AT_ONCE)

    def close(self) -> None:
        """Wait for requests in preparation."""
        self._preparing.shutdown()
        self._preparing_long.shutdown(cancel_futures=True)
        for served in self.models.values():
            served.grammar_trials.close()
        if self._tracing is not None:
            self._tracing.close()

    def stop(self) -> None:
        """Fail running and future requests with status 503. Call it in the event loop's thread."""
        self._stopped = ApiError(503, "the server is being shut down", code="shutting_down", headers=CLOSE)
        for generation in self._running:
            generation.fail(self._stopped)

    def model(self, name: str | None) -> ServedModel:
        """Return the model of a name; the first one for `None`.

        Raises:
            ApiError: No model has this name.
        """
        served = next(iter(self.models.values())) if name is None else self.models.get(name)
        if served is None:
            names = f"{'models are' if len(self.models) > 1 else 'model is'} {', '.join(map(repr, self.models))}"
            raise ApiError(404, f"model {name!r} is not served here; the {names}", "model", "model_not_found")
        return served

    async def prepared(self, make: Callable[[], Any], http: Request, takes_long: bool = False) -> Any:
        """Call `make` in a thread, and return its result. Slow requests never block fast ones.

        Args:
            http: The request; a large body makes it slow.
            takes_long: Whether it is slow for another reason.
        """
        long = takes_long or int(http.headers.get("content-length", _SHORT)) >= _SHORT
        threads = self._preparing_long if long else self._preparing
        return await asyncio.get_running_loop().run_in_executor(threads, make)

    async def answer(
        self, request: ChoicesRequest, http: Request, form: Callable[[Generation], AnswerForm]
    ) -> Response:
        """Generate `request.n` answers to each prompt, in the response format of the route.

        Raises:
            ApiError: The request is invalid, or the queue is full.
        """
        served = self.model(request.model)
        _check(request)
        count = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        self._take(count)

        def on_end() -> None:
            self._places -= count
            self._running.remove(generation)
            answers = generation.answers
            self.metrics.count_prompts(served.name, answers, request.n)
            http.state.notes.update(  # for the log
                user=request.user,
                prompt_tokens=sum(len(plan.prompt) for plan in generation.plans),
                completion_tokens=sum(answer.handle.statistics.tokens for answer in answers),
                steps=sum(answer.handle.statistics.steps for answer in answers),
                finish_reasons=[answer.handle.finish_reason or "cancelled" for answer in answers],
            )
            if invalid := generation.invalid_json():
                http.state.notes["no_json"] = invalid
            if self._tracing is not None and answers:
                self._tracing.record(generation, http.state.number, http.headers)

        generation = Generation(served, request, self._settings, self.metrics, self._outboxes[served.name], on_end)
        generation.tenant = http.state.tenant
        self._running.add(generation)
        http.state.notes["stage"] = "prepare"
        try:
            has_grammar = request.structured_outputs is not None
            if isinstance(request, ChatRequest):
                has_grammar |= bool(request.tools) or request.response_format is not None
                await self.with_images(served, request.messages, http, generation.prepare, has_grammar)
            else:
                scores = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
                await self.prepared(partial(generation.prepare, []), http, has_grammar or scores)
            http.state.notes["stage"] = "submit"
            loop = asyncio.get_running_loop()
            for index in range(count):  # one task each, so that other requests get their turn
                await loop.run_in_executor(self._preparing, generation.submit, loop, index)
            self.metrics.count(served.name, PROMPT_TOKENS, sum(len(plan.prompt) for plan in generation.plans))
            http.state.notes["stage"] = "answer"
            return await deliver(http, form(generation))
        except BaseException:
            generation.close()
            raise

    async def with_images(
        self,
        served: ServedModel,
        messages: Sequence[Message],
        http: Request,
        make: Callable[[Sequence[bytes]], Any],
        takes_long: bool = False,
    ) -> Any:
        """Fetch the images of a conversation, and call `make` with their files as `prepared` does.

        Raises:
            ApiError: The model reads no images, or an image is unavailable or invalid.
        """
        urls = [url for message in messages for url in message.images]
        if not urls:
            return await self.prepared(partial(make, []), http, takes_long)
        if served.processor is None:
            raise errors.refused("messages", "messages has an image, but this model reads only text; leave it out")
        async with self._seeing:  # bounds the files in memory
            files = await asyncio.to_thread(read_images, urls, self._settings)
            return await self.prepared(partial(make, files), http, takes_long=True)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Occupy a place in the queue for a request without an answer.

        Raises:
            ApiError: The queue is full.
        """
        self._take(1)
        try:
            yield
        finally:
            self._places -= 1

    def _take(self, count: int) -> None:
        """Occupy places for `count` answers, or raise `ApiError`."""
        if self._stopped is not None:
            raise self._stopped
        limit = self._settings.max_rows + self._settings.queue
        if count > limit:
            raise ApiError(400, f"{count} answers are more than the {limit} places of this server; lower n", "n")
        if self._places + count > limit:
            message = f"{self._places} answers run or wait; try again later"
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(_RETRY_AFTER)})
        self._places += count


def _check(request: ChoicesRequest) -> None:
    if isinstance(request, CompletionRequest) and (request.best_of or 0) > request.n:
        raise errors.refused("best_of", f"best_of={request.best_of} is more than n: answers are not ranked; use n")
    if "stream_options" in request.model_fields_set and not request.stream:
        raise errors.refused("stream_options", "stream_options needs stream=true")


async def deliver(http: Request, form: AnswerForm) -> Response:
    """Return the response to a request with running answers. They are cancelled if the client disconnects."""
    if form.request.stream:
        return EventStream(form, http.state.notes)
    watch = asyncio.create_task(_fail_on_disconnect(http, form.generation))
    try:
        body = await asyncio.to_thread(_encoded, form, await _wholes(form))  # may be megabytes
        return Response(body, media_type="application/json")
    finally:
        watch.cancel()
        form.generation.close()


class EventStream(StreamingResponse):
    """Response that sends answers as server-sent events. Errors are added to `notes`, for the log."""

    def __init__(self, form: AnswerForm, notes: dict[str, Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)
        self._form, self._generation, self._notes = form, form.generation, notes
        self._send_part: Callable[[Callable[[], bytes]], bool] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancel the answers at the timeout, or when the client disconnects."""
        after = self._generation.remaining_seconds + _UNREAD
        timer = asyncio.get_running_loop().call_later(after, self._generation.close)  # the client may read nothing
        if scope["http_version"] == "1.1":  # others have no chunks
            self._send_part = scope["state"].get("send_part")
        try:
            await super().__call__(scope, receive, send)
        finally:  # even before the first event
            timer.cancel()
            self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        form, generation = self._form, self._generation
        try:
            for chunk in form.opening():
                yield _event(chunk)
            if self._send_part is not None:
                generation.write = partial(self._write, self._send_part)
            async for news in generation:
                if events := _joined(form, news):
                    yield events
            for chunk in form.closing():
                yield _event(chunk)
        except Exception as error:  # too late for another status
            api_error = as_api_error(error)
            if api_error.status_code == FAILED:
                self._notes["error"] = error_summary(error)
                write_line("".join(format_exception(error)))
            yield _event(form.failure(api_error))
        yield form.last_event

    def _write(self, send_part: Callable[[Callable[[], bytes]], bool], answer: Answer, pieces: Sequence[Piece]) -> bool:
        """Send pieces past the layers between, which cost more than the rest; return whether the client reads."""

        def events() -> bytes:
            for piece in pieces:
                answer.read(piece)
            return _joined(self._form, [(answer, piece) for piece in pieces])

        return send_part(events)


async def _wholes(form: AnswerForm) -> list[Piece]:
    wholes = [Piece() for _ in form.generation.answers]
    async for news in form.generation:
        for answer, piece in news:
            if piece is not None:
                wholes[answer.index].text += piece.text
                wholes[answer.index].logprobs += piece.logprobs
    return wholes


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encoded(form: AnswerForm, wholes: Sequence[Piece]) -> bytes:
    """Encode a response piece by piece, so that other threads run in between."""
    return "".join(_JSON.iterencode(form.whole(wholes))).encode()


def _joined(form: AnswerForm, news: Sequence[tuple[Answer, Piece | None]]) -> bytes:
    return b"".join([_event(chunk) for answer, piece in news for chunk in form.chunks(answer, piece)])


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + to_json(data) + b"\n\n"


async def _fail_on_disconnect(http: Request, generation: Generation) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    generation.fail(ApiError(CLIENT_CLOSED_REQUEST, "the client disconnected"))
