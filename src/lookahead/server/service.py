"""Answers requests: from a checked request to the response, whole or as server-sent events."""

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
from lookahead.server.answers import Form
from lookahead.server.errors import CLIENT_LEFT, CLOSE, FAILED, ApiError, as_api_error, described
from lookahead.server.generation import Generation
from lookahead.server.guard import ServerSettings
from lookahead.server.images import read_images
from lookahead.server.log import write_line
from lookahead.server.messages import Message
from lookahead.server.metrics import PROMPT_TOKENS, Metrics
from lookahead.server.outbox import Outbox, Piece
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest
from lookahead.server.served_model import ServedModel
from lookahead.server.tracing import Tracing

_RETRY_AFTER = 2
"""Seconds after which a client that was sent away may try again."""

_UNREAD = 1.0
"""Seconds in which a client has to read that its time is over, before its answers are given up."""

_SHORT = 2**16
"""Bytes of a body that is prepared at once. Longer ones are prepared beside one another, as are grammars and images."""

_PREPARED_AT_ONCE = 4
"""Requests that take long to prepare."""


class Service:
    """Makes the answers of a server.

    Attributes:
        models: By the names that clients call them.
        metrics: What is told to Prometheus.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self.models = {served.name: served for served in models}
        self.metrics = Metrics({served.name: served.engine for served in models})
        self._settings = settings
        self._outboxes = {name: Outbox(partial(self.metrics.steps, name)) for name in self.models}
        self._running: set[Generation] = set()
        self._taken = 0  # places of answers that are made, or wait, and of requests that make none
        self._stopped: ApiError | None = None
        self._preparing = ThreadPoolExecutor(1, "lookahead-prepare")
        self._preparing_long = ThreadPoolExecutor(_PREPARED_AT_ONCE, "lookahead-prepare-long")
        self._seeing = asyncio.Semaphore(_PREPARED_AT_ONCE)

    def close(self) -> None:
        """Wait for what is being prepared."""
        self._preparing.shutdown()
        self._preparing_long.shutdown(cancel_futures=True)
        for served in self.models.values():
            served.grammar_trials.close()
        if self._tracing is not None:
            self._tracing.close()

    def stop(self) -> None:
        """Answer what runs, and all that comes, with status 503. For the event loop's thread."""
        self._stopped = ApiError(503, "the server is being shut down", code="shutting_down", headers=CLOSE)
        for generation in self._running:
            generation.fail(self._stopped)

    def model(self, name: str | None) -> ServedModel:
        """The model of a name; the first one for none.

        Raises:
            ApiError: There is none of that name.
        """
        found = next(iter(self.models.values())) if name is None else self.models.get(name)
        if found is None:
            served = f"{'models are' if len(self.models) > 1 else 'model is'} {', '.join(map(repr, self.models))}"
            raise ApiError(404, f"model {name!r} is not served here; the {served}", "model", "model_not_found")
        return found

    async def prepared(self, make: Callable[[], Any], http: Request, takes_long: bool = False) -> Any:
        """What `make` returns, called in a thread in which nothing that takes long comes before it.

        Args:
            http: Whose request it is. A large body takes long.
            takes_long: Whether it does so anyway.
        """
        long = takes_long or int(http.headers.get("content-length", _SHORT)) >= _SHORT
        threads = self._preparing_long if long else self._preparing
        return await asyncio.get_running_loop().run_in_executor(threads, make)

    async def answer(self, request: ChoicesRequest, http: Request, form: Callable[[Generation], Form]) -> Response:
        """Decode `request.n` answers to each prompt, and write them in the form of the route.

        Raises:
            ApiError: The request asks for what the server cannot do, or there are too many at the moment.
        """
        served = self.model(request.model)
        _check(request)
        count = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        self._take(count)

        def ended() -> None:
            self._taken -= count
            self._running.remove(generation)
            answers = generation.answers
            self.metrics.through(served.name, answers, request.n)
            http.state.notes.update(  # for the log
                user=request.user,
                prompt_tokens=sum(len(plan.prompt) for plan in generation.plans),
                completion_tokens=sum(answer.handle.statistics.tokens for answer in answers),
                steps=sum(answer.handle.statistics.steps for answer in answers),
                finish_reasons=[answer.handle.finish_reason or "cancelled" for answer in answers],
            )
            if faulty := generation.faulty():
                http.state.notes["no_json"] = faulty
            if self._tracing is not None and answers:
                self._tracing.record(generation, http.state.number, http.headers)

        generation = Generation(served, request, self._settings, self.metrics, self._outboxes[served.name], ended)
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
            for index in range(count):  # between which other requests are prepared
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
        """What `make` returns for the files of the images of a conversation; see `prepared`.

        Raises:
            ApiError: The model reads none, or one cannot be had or read.
        """
        urls = [url for message in messages for url in message.images]
        if not urls:
            return await self.prepared(partial(make, []), http, takes_long)
        if served.processor is None:
            raise errors.refused("messages", "messages has an image, but this model reads text alone")
        async with self._seeing:  # there are no more files at once
            files = await asyncio.to_thread(read_images, urls, self._settings)
            return await self.prepared(partial(make, files), http, takes_long=True)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue, for what makes no answer.

        Raises:
            ApiError: There is none.
        """
        self._take(1)
        try:
            yield
        finally:
            self._taken -= 1

    def _take(self, count: int) -> None:
        """Take places for so many further answers, unless there are not enough."""
        if self._stopped is not None:
            raise self._stopped
        most = self._settings.max_rows + self._settings.queue
        if count > most:
            raise ApiError(400, f"{count} answers are more than the {most} that this server makes at once", "n")
        if self._taken + count > most:
            message = f"{self._taken} answers are being made or wait; try again later"
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(_RETRY_AFTER)})
        self._taken += count


def _check(request: ChoicesRequest) -> None:
    if isinstance(request, CompletionRequest) and (request.best_of or 0) > request.n:
        raise errors.refused("best_of", f"best_of={request.best_of} is more than n: answers are not ranked here; use n")
    if "stream_options" in request.model_fields_set and not request.stream:
        raise errors.refused("stream_options", "stream_options needs stream=true")


async def deliver(http: Request, form: Form) -> Response:
    """The response to a request whose answers are being made. A client that goes away ends them."""
    if form.request.stream:
        return EventStream(form, http.state.notes)
    watch = asyncio.create_task(_fail_if_left(http, form.generation))
    try:
        wholes = await _wholes(form)
        body = await asyncio.to_thread(_encoded, form, wholes)  # which may be of megabytes
        return Response(body, media_type="application/json")
    finally:
        watch.cancel()
        form.generation.close()


class EventStream(StreamingResponse):
    """Answers as server-sent events. What fails is told by `notes`, for the log."""

    def __init__(self, form: Form, notes: dict[str, Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(form, notes), media_type="text/event-stream", headers=headers)
        self._generation = form.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        after = self._generation.seconds_left + _UNREAD
        timer = asyncio.get_running_loop().call_later(after, self._generation.close)  # nothing is read, so none is told
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client left before the first event
            timer.cancel()
            self._generation.close()


async def _wholes(form: Form) -> list[Piece]:
    wholes = [Piece() for _ in form.generation.answers]
    async for news in form.generation:
        for answer, piece in news:
            if piece is not None:
                wholes[answer.index].text += piece.text
                wholes[answer.index].logprobs += piece.logprobs
    return wholes


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encoded(form: Form, wholes: Sequence[Piece]) -> bytes:
    """The answer to a request, encoded piece by piece: other threads run in between."""
    return "".join(_JSON.iterencode(form.whole(wholes))).encode()


async def _events(form: Form, notes: dict[str, Any]) -> AsyncIterator[bytes]:
    try:
        for chunk in form.opening():
            yield _event(chunk)
        async for news in form.generation:
            if events := [_event(chunk) for answer, piece in news for chunk in form.chunks(answer, piece)]:
                yield b"".join(events)
        for chunk in form.closing():
            yield _event(chunk)
    except Exception as error:  # the status is sent already, so that it can only be told here
        api_error = as_api_error(error)
        if api_error.status_code == FAILED:
            notes["error"] = described(error)
            write_line("".join(format_exception(error)))
        yield _event(form.failure(api_error))
    yield form.last_event


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + to_json(data) + b"\n\n"


async def _fail_if_left(http: Request, generation: Generation) -> None:
    """Break the answers off once the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    generation.fail(ApiError(CLIENT_LEFT, "the client has gone"))
