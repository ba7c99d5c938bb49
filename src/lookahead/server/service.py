"""Answers requests: from a checked request to the response, on the engine of a served model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from lookahead.server import errors
from lookahead.server.answers import CompletionForm, Form
from lookahead.server.delivery import deliver
from lookahead.server.errors import CLOSE, ApiError
from lookahead.server.generation import Generation
from lookahead.server.load import Load
from lookahead.server.metrics import Metrics, RequestClock
from lookahead.server.plan import Plan, make_plan
from lookahead.server.requests import ChoicesRequest, CompletionRequest
from lookahead.server.served_model import ServedModel
from lookahead.server.settings import ServerSettings

COMPLETION_TOKENS = 16
"""Most tokens of an answer of `/v1/completions` that names no number, as in OpenAI's API."""


class Service:
    """Makes the answers of a server.

    Args:
        served: The model, its tokenizer and its engine.
        settings: Limits of the server.
        metrics: What is told to Prometheus.
    """

    def __init__(self, served: ServedModel, settings: ServerSettings, metrics: Metrics) -> None:
        self._served = served
        self._settings = settings
        self._metrics = metrics
        self._load = Load(settings.rows + settings.queue)
        self._running: set[Generation] = set()
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

    async def prepared(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, called in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    async def answer(
        self,
        request: ChoicesRequest,
        http: Request,
        form: type[Form],
        prompts: Callable[[], list[list[int]]],
        count: int,
    ) -> Response:
        """Decode `request.n` answers to each of `count` prompts, and write them in the form of the route.

        Raises:
            ApiError: The request asks for what the server cannot do, or there are too many at the moment.
        """
        served, metrics = self._served, self._metrics
        if self._stopped is not None:
            raise self._stopped
        served.check_name(request.model)
        _check(request)
        loop, count = asyncio.get_running_loop(), count * request.n
        default = COMPLETION_TOKENS if form is CompletionForm else None
        self._load.take(count)

        def ended() -> None:
            self._running.discard(generation)
            self._load.give_back(count)
            metrics.through(generation.answers, request.n)
            http.state.notes.update(_notes(request, generation))

        generation = Generation(served, RequestClock(metrics), self._settings.timeout, ended)
        self._running.add(generation)

        def prepare() -> list[Plan]:
            plans = [make_plan(served, request, prompt, self._settings.limits, default) for prompt in prompts()]
            generation.submit(plans, request.n, loop)
            return plans

        try:
            plans = await self.prepared(prepare)
            metrics.prompt_tokens.inc(sum(len(plan.prompt) for plan in plans))
            return await deliver(http, form(served, request, plans), generation, request.stream)
        except BaseException:
            generation.close()
            raise


def _notes(request: ChoicesRequest, generation: Generation) -> dict[str, Any]:
    """What the log says of a request."""
    answers = generation.answers
    return {
        "user": request.user,
        "prompt_tokens": sum(len(answer.plan.prompt) for answer in answers[:: request.n]),
        "completion_tokens": sum(answer.tokens for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "finish_reasons": [answer.finish_reason or "abort" for answer in answers],
    }


def _check(request: ChoicesRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise errors.refused("stream_options", "stream_options needs stream=true")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise errors.refused("echo", "echo does not go with logprobs: only answers have log-probabilities here")
