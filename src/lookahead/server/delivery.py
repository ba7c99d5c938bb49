"""Sending answers: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lookahead.errors import LookaheadError
from lookahead.server.answers import Form
from lookahead.server.errors import ApiError, of_library
from lookahead.server.generation import Generation, Piece

CLIENT_LEFT = 499


async def deliver(http: Request, form: Form, generation: Generation, stream: bool) -> Response:
    """The response to a request whose answers are being made. A client that goes away ends them."""
    if stream:
        return EventStream(form, generation)
    whole = asyncio.create_task(_whole(form, generation))
    left = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await whole) if whole.done() else Response(status_code=CLIENT_LEFT)
    finally:
        whole.cancel()
        left.cancel()
        generation.close()


class EventStream(StreamingResponse):
    """Answers as server-sent events."""

    def __init__(self, form: Form, generation: Generation) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(form, generation), media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client left before the first event
            self._generation.close()


async def _whole(form: Form, generation: Generation) -> dict[str, Any]:
    pieces: list[list[Piece]] = [[] for _ in generation.answers]
    async for answer, piece in generation:
        if piece is not None:
            pieces[answer.index].append(piece)
    return form.whole(generation, pieces)


async def _events(form: Form, generation: Generation) -> AsyncIterator[bytes]:
    try:
        for chunk in form.opening(generation):
            yield _event(chunk)
        async for answer, piece in generation:
            for chunk in form.chunks(answer, piece):
                yield _event(chunk)
        for chunk in form.closing(generation):
            yield _event(chunk)
    except Exception as error:  # the status is sent already, so that it can only be told here
        yield _event(form.failure(as_api_error(error)))
    yield form.last_event


def as_api_error(error: Exception) -> ApiError:
    """Any error in the form that clients know."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LookaheadError):
        return of_library(error)
    return ApiError(500, "the server failed; its log says why")


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _disconnected(http: Request) -> None:
    """Wait until the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
