"""The web application: routes, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from lookahead.errors import LookaheadError
from lookahead.server import errors
from lookahead.server.answers import ChatForm, CompletionForm, Form
from lookahead.server.delivery import deliver
from lookahead.server.errors import ApiError
from lookahead.server.generation import Generation
from lookahead.server.grammar import check_grammar
from lookahead.server.guard import Guard, log_line
from lookahead.server.load import Load
from lookahead.server.metrics import Metrics, RequestClock
from lookahead.server.plan import Grammar, Plan, make_plan
from lookahead.server.requests import ChatRequest, CompletionRequest, ResponsesRequest, TextRequest, TokenizeRequest
from lookahead.server.responses import ResponsesForm
from lookahead.server.served_model import ServedModel
from lookahead.server.settings import ServerSettings
from lookahead.server.structure import callable_tools, grammar_of
from lookahead.serving import Engine
from lookahead.version import __version__

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"}

COMPLETION_TOKENS = 16
"""Most tokens of an answer of `/v1/completions` that names no number, as in OpenAI's API."""


def create_app(served: ServedModel, settings: ServerSettings) -> FastAPI:
    """The application that serves a model. Its engine is started with it, and closed."""
    preparing = ThreadPoolExecutor(1, "lookahead-prepare")  # tokenizing a long prompt must not hold up the others

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(served.engine.close, True)
            preparing.shutdown()

    app = FastAPI(title="lookahead", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    metrics, load = Metrics(served.name), Load(settings.rows + settings.queue)
    _add_gauges(metrics, served.engine)
    app.add_middleware(Guard, settings=settings, refused=metrics.refused, log=log_line)

    async def prepared(make: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(preparing, make)

    async def answer(
        request: TextRequest, http: Request, form: type[Form], prompts: Callable[[], list[list[int]]], count: int
    ) -> Response:
        served.check_name(request.model)
        _check_stream_options(request)
        loop, count = asyncio.get_running_loop(), count * request.n
        default = COMPLETION_TOKENS if form is CompletionForm else None
        load.take(count)

        def ended() -> None:
            load.give_back(count)
            metrics.reuse(generation.answers[:: request.n])
            http.state.notes.update(_notes(request, generation))

        generation = Generation(served, RequestClock(metrics), settings.timeout, ended)

        def prepare() -> list[Plan]:
            grammar = _grammar(served, request)
            plans = [make_plan(served, request, prompt, settings.limits, default, grammar) for prompt in prompts()]
            generation.submit(plans, request.n, loop)
            return plans

        try:
            plans = await prepared(prepare)
            metrics.prompt_tokens.inc(sum(len(plan.prompt) for plan in plans))
            return await deliver(http, form(served, request, plans), generation, request.stream)
        except BaseException:
            generation.close()
            raise

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server is there."""
        return {"status": "ok"}

    @app.get("/load")
    async def told_load() -> dict[str, int]:
        """How much there is to do at the moment."""
        now = served.engine.load
        counts = {"server_load": now.running + now.waiting, "running": now.running, "waiting": now.waiting}
        return {**counts, "kv_bytes": now.kv_bytes, "prefix_bytes": now.prefix_bytes}

    @app.get("/metrics")
    async def told_metrics() -> Response:
        """Counts, for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [_card(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        served.check_name(name)
        return _card(served)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        return await answer(request, http, CompletionForm, lambda: _prompts(served, request), len(request.prompts))

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Continue a conversation."""
        return await answer(request, http, ChatForm, lambda: [_chat_prompt(served, request)], 1)

    @app.post("/v1/responses")
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Answer a text or a conversation."""
        chat = request.as_chat()
        return await answer(chat, http, ResponsesForm, lambda: [_chat_prompt(served, chat)], 1)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text, or of a conversation."""
        served.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", "prompt", "invalid_value")
        prompt, messages = request.prompt, request.messages
        if prompt is not None:
            tokens = await prepared(lambda: served.encode(prompt, request.add_special_tokens))
        else:
            tokens = await prepared(lambda: served.encode_chat(messages or []))
        return {"count": len(tokens), "max_model_len": served.context_length, "tokens": tokens}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """A chat that shows what lookahead decoding does."""
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def _notes(request: TextRequest, generation: Generation) -> dict[str, Any]:
    """What the log says of a request."""
    answers = generation.answers
    return {
        "user": request.user,
        "prompt_tokens": sum(len(answer.plan.prompt) for answer in answers[:: request.n]),
        "completion_tokens": sum(answer.tokens for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "finish_reasons": [answer.finish_reason or "abort" for answer in answers],
    }


def _add_gauges(metrics: Metrics, engine: Engine) -> None:
    metrics.gauge("vllm:num_requests_running", "Answers that are being made.", lambda: engine.load.running)
    metrics.gauge("vllm:num_requests_waiting", "Answers that wait for their turn.", lambda: engine.load.waiting)
    metrics.gauge("lookahead:kv_bytes", "Keys and values of running answers.", lambda: engine.load.kv_bytes)
    metrics.gauge("lookahead:prefix_bytes", "Keys and values that are kept.", lambda: engine.load.prefix_bytes)


def _card(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "lookahead",
        "max_model_len": served.context_length,
    }


def _prompts(served: ServedModel, request: CompletionRequest) -> list[list[int]]:
    return [served.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]


def _chat_prompt(served: ServedModel, request: ChatRequest) -> list[int]:
    return served.encode_chat(request.messages, callable_tools(request))


def _grammar(served: ServedModel, request: TextRequest) -> Grammar | None:
    asked = grammar_of(request) if isinstance(request, ChatRequest) else None
    if asked is None:
        return None
    grammar, field = asked
    if not served.end_tokens:
        raise errors.refused(field, f"{field} needs a model with an end-of-sequence token, which this one lacks")
    check_grammar(grammar, served.grammar_tokenizer, field)
    return served.grammar_tokenizer, grammar


def _check_stream_options(request: TextRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise errors.refused("stream_options", "stream_options needs stream=true")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(LookaheadError)
    async def library_error(request: Request, error: LookaheadError) -> Response:
        return await api_error(request, errors.of_library(error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, errors.of_validation(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return await api_error(request, ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, "the server failed; its log says why"))
