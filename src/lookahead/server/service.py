"""Answers requests: from a checked request to the response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from traceback import format_exception
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL.Image import Image
from starlette.types import Receive, Scope, Send

from lookahead.server import errors
from lookahead.server.answers import Form
from lookahead.server.errors import CLIENT_LEFT, CLOSE, FAILED, ApiError, as_api_error
from lookahead.server.generation import Generation, Piece
from lookahead.server.guard import ServerSettings, write_line
from lookahead.server.metrics import PROMPT_TOKENS, Metrics
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest, Message
from lookahead.server.served_model import ServedModel, read_images

_RETRY_AFTER = 2
"""Seconds after which a client that was sent away may try again."""


class Service:
    """Makes the answers of a server.

    Attributes:
        models: By the names that clients call them.
        metrics: What is told to Prometheus.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings) -> None:
        self.models = {served.name: served for served in models}
        self.metrics = Metrics({served.name: served.engine for served in models})
        self._settings = settings
        self._running: dict[Generation, int] = {}  # with how many answers each makes
        self._stopped: ApiError | None = None
        self._preparing = ThreadPoolExecutor(1, "lookahead-prepare")  # a long prompt must not hold up the others

    def close(self) -> None:
        """Wait for what is being prepared."""
        self._preparing.shutdown()

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

    async def prepared(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, called in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    async def answer(self, request: ChoicesRequest, http: Request, form: type[Form]) -> Response:
        """Decode `request.n` answers to each prompt, and write them in the form of the route.

        Raises:
            ApiError: The request asks for what the server cannot do, or there are too many at the moment.
        """
        if self._stopped is not None:
            raise self._stopped
        served = self.model(request.model)
        _check(request)
        images = await self.images(served, request.messages) if isinstance(request, ChatRequest) else []
        count = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        self._make_room(count)

        def ended() -> None:
            self._running.pop(generation)
            answers = generation.answers
            self.metrics.through(served.name, answers, request.n)
            http.state.notes.update(  # for the log
                user=request.user,
                prompt_tokens=sum(len(plan.prompt) for plan in generation.plans),
                completion_tokens=sum(answer.handle.statistics.tokens for answer in answers),
                steps=sum(answer.handle.statistics.steps for answer in answers),
                finish_reasons=[answer.handle.finish_reason or "cancelled" for answer in answers],
            )

        generation = Generation(served, request, self._settings, self.metrics, ended)
        self._running[generation] = count
        try:
            await self.prepared(partial(generation.submit, images, asyncio.get_running_loop()))
            self.metrics.count(served.name, PROMPT_TOKENS, sum(len(plan.prompt) for plan in generation.plans))
            return await deliver(http, form(generation))
        except BaseException:
            generation.close()
            raise

    async def images(self, served: ServedModel, messages: Sequence[Message]) -> list[Image]:
        """The images of a conversation, read in a thread that no other request waits for.

        Raises:
            ApiError: The model reads none, or one cannot be had or read.
        """
        urls = [url for message in messages for url in message.images]
        if urls and served.processor is None:
            raise errors.refused("messages", "messages has an image, but this model reads text alone")
        return await asyncio.to_thread(read_images, urls, self._settings) if urls else []

    def _make_room(self, count: int) -> None:
        """Refuse so many further answers if there is no room for them."""
        most, running = self._settings.max_rows + self._settings.queue, sum(self._running.values())
        if count > most:
            raise ApiError(400, f"{count} answers are more than the {most} that this server makes at once", "n")
        if running + count > most:
            message = f"{running} answers are being made or wait; try again later"
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(_RETRY_AFTER)})


def _check(request: ChoicesRequest) -> None:
    if "stream_options" in request.model_fields_set and not request.stream:
        raise errors.refused("stream_options", "stream_options needs stream=true")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise errors.refused("echo", "echo does not go with logprobs: only answers have log-probabilities here")


async def deliver(http: Request, form: Form) -> Response:
    """The response to a request whose answers are being made. A client that goes away ends them."""
    if form.request.stream:
        return EventStream(form)
    watch = asyncio.create_task(_fail_if_left(http, form.generation))
    try:
        return JSONResponse(await _whole(form))
    finally:
        watch.cancel()
        form.generation.close()


class EventStream(StreamingResponse):
    """Answers as server-sent events."""

    def __init__(self, form: Form) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(form), media_type="text/event-stream", headers=headers)
        self._generation = form.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client left before the first event
            self._generation.close()


async def _whole(form: Form) -> dict[str, Any]:
    wholes = [Piece() for _ in form.generation.answers]
    async for answer, piece in form.generation:
        if piece is not None:
            wholes[answer.index].text += piece.text
            wholes[answer.index].logprobs += piece.logprobs
    return form.whole(wholes)


async def _events(form: Form) -> AsyncIterator[bytes]:
    try:
        for chunk in form.opening():
            yield _event(chunk)
        async for answer, piece in form.generation:
            for chunk in form.chunks(answer, piece):
                yield _event(chunk)
        for chunk in form.closing():
            yield _event(chunk)
    except Exception as error:  # the status is sent already, so that it can only be told here
        api_error = as_api_error(error)
        if api_error.status_code == FAILED:
            write_line("".join(format_exception(error)))
        yield _event(form.failure(api_error))
    yield form.last_event


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _fail_if_left(http: Request, generation: Generation) -> None:
    """Break the answers off once the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    generation.fail(ApiError(CLIENT_LEFT, "the client has gone"))
