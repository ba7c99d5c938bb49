"""Web application: routes and error responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from lookahead.errors import LookaheadError
from lookahead.server.answers import ChatForm, CompletionForm
from lookahead.server.anthropic import CountRequest, MessagesForm, MessagesRequest
from lookahead.server.errors import ApiError, as_api_error
from lookahead.server.fields import json_error_message
from lookahead.server.guard import Guard, ServerSettings
from lookahead.server.metrics import REFUSED
from lookahead.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from lookahead.server.responses import ResponsesForm
from lookahead.server.responses_request import RESPONSES_NAMES, ResponsesRequest
from lookahead.server.served_model import ServedModel
from lookahead.server.service import Service
from lookahead.server.tracing import Tracing
from lookahead.version import __version__

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"}


def create_app(models: Sequence[ServedModel], settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """Return the application. It starts the engines of the models, and closes them."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for served in models:
            served.engine.start()
        try:
            yield
        finally:
            for served in models:
                await asyncio.to_thread(served.engine.close, True)
            service.close()

    handlers: dict[Any, Any] = dict.fromkeys(
        (HTTPException, RequestValidationError, LookaheadError, Exception), _error_response
    )
    app = FastAPI(
        title="lookahead",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers,
    )
    service = app.state.service = Service(models, settings, tracing)
    refused = partial(service.metrics.count, models[0].name, REFUSED, 1)
    app.add_middleware(Guard, settings=settings, refused=refused)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    _add_state(app, service)
    _add_texts(app, service)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Chat page that shows the steps of lookahead decoding."""
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    """Add the routes for the state of the server and its models."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Health of the server."""
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of the library."""
        return {"version": __version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Current load: running and waiting answers, and the memory for keys and values."""
        loads = [asdict(served.engine.load) for served in service.models.values()]
        total = {name: sum(load[name] or 0 for load in loads) for name in loads[0]}
        limit = total.pop("kv_limit_bytes")
        total["server_load"] = total["running"] + total["waiting"]
        return total | ({"kv_limit_bytes": limit} if limit else {})

    @app.get("/metrics")
    async def metric_counts() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Served models."""
        return {"object": "list", "data": [_card(served) for served in service.models.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return _card(service.model(name))


def _add_texts(app: FastAPI, service: Service) -> None:
    """Add the routes that generate, encode or decode texts."""

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        return await service.answer(request, http, CompletionForm)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Continue a conversation."""
        return await service.answer(request, http, ChatForm)

    @app.post("/v1/responses")
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Answer a text or a conversation."""
        try:
            if hosted_tools := request.hosted_tools:
                http.state.notes["left_out"] = hosted_tools
            return await service.answer(request.as_chat(), http, partial(ResponsesForm, request))
        except ApiError as error:
            raise error.renamed(RESPONSES_NAMES) from error

    @app.post("/v1/messages")
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Answer a conversation, in Anthropic's protocol."""
        return await service.answer(request.as_chat(), http, MessagesForm)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: CountRequest, http: Request) -> dict[str, int]:
        """Count the tokens of a conversation."""
        served, chat = service.model(request.model), request.as_chat()
        with service.place():
            prompts = await service.with_images(served, chat.messages, http, partial(served.prompts, chat))
        return {"input_tokens": len(prompts[0].tokens)}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest, http: Request) -> dict[str, Any]:
        """Encode a text or a conversation."""
        served = service.model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
        with service.place():
            if (prompt := request.prompt) is not None:
                tokens = await service.prepared(lambda: served.encode(prompt, request.add_special_tokens), http)
            else:
                messages = request.messages or []
                encode = partial(served.encode_chat, messages, (), None)
                tokens = (await service.with_images(served, messages, http, encode)).tokens
        return {"count": len(tokens), "max_model_len": served.max_length, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, http: Request) -> dict[str, str]:
        """Decode token ids."""
        served = service.model(request.model)
        served.check_length(request.tokens, "tokens")
        served.check_tokens(request.tokens, "tokens")
        with service.place():
            return {"prompt": await service.prepared(lambda: served.tokenizer.decode(request.tokens), http)}


def _card(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "lookahead",
        "max_model_len": served.max_length,
    }


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        message = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json lists all routes"
        if isinstance(error.__cause__, Exception):
            message = f"the body is not valid JSON: {json_error_message(error.__cause__)}"
        error = ApiError(error.status_code, message, headers=error.headers)
    error = as_api_error(error, request.headers.get("content-type", ""))
    if request.url.path.startswith("/v1/messages"):  # Anthropic's clients expect the type of the body
        return JSONResponse({"type": "error"} | error.body(), error.status_code, error.headers)
    return error.response()
