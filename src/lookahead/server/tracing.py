"""Spans of requests for OpenTelemetry. Names of attributes are vLLM's where they mean the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lookahead.errors import InvalidArgumentError, extra_hint
from lookahead.server.generation import Generation
from lookahead.version import __version__

_NANOSECONDS = 10**9


class Tracing:
    """Records a span for each request that generates text.

    Args:
        provider: `TracerProvider` of OpenTelemetry's SDK.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._tracer = provider, provider.get_tracer("lookahead", __version__)
        self._kind, self._failed = SpanKind.SERVER, StatusCode.ERROR
        self._context_of = TraceContextTextMapPropagator().extract

    def record(self, generation: Generation, number: str, headers: Mapping[str, str]) -> None:
        """Record a request that has ended.

        Args:
            number: Identifier of the request, as in its log line.
            headers: Its headers; `traceparent` names the client's span.
        """
        end = time.time_ns()
        begin = end - int(generation.seconds * _NANOSECONDS)
        context = self._context_of(headers)
        span = self._tracer.start_span("llm_request", context, self._kind, start_time=begin)
        span.set_attributes({"gen_ai.request.id": number, **attributes(generation)})
        if any(answer.handle.finish_reason == "error" for answer in generation.answers):
            span.set_status(self._failed)
        span.end(end)

    def close(self) -> None:
        """Send the recorded spans."""
        self._provider.shutdown()


def attributes(generation: Generation) -> dict[str, Any]:
    """Return the attributes of a request's span. Latencies are in seconds, of the first answer where they differ."""
    answers, arguments = generation.answers, generation.plans[0].arguments
    counts = [answer.handle.statistics for answer in answers]
    drafts = [
        (nodes - 1, tokens - 1)
        for count in counts
        for nodes, tokens in zip(count.nodes_per_step, count.accepted_lengths, strict=True)
        if nodes > 1
    ]
    waited = [count.queue_seconds for count in counts if count.queue_seconds is not None]
    first = [answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None]
    attributes = {
        "gen_ai.response.model": generation.served.name,
        "gen_ai.response.finish_reasons": [answer.handle.finish_reason or "cancelled" for answer in answers],
        "gen_ai.request.max_tokens": arguments["max_new_tokens"],
        "gen_ai.request.temperature": float(arguments.get("temperature", 0.0)),
        "gen_ai.request.top_p": float(arguments.get("top_p", 1.0)),
        "gen_ai.request.n": generation.request.n,
        "gen_ai.usage.num_sequences": len(answers),
        "gen_ai.usage.prompt_tokens": sum(len(plan.prompt) for plan in generation.plans),
        "gen_ai.usage.completion_tokens": sum(count.tokens for count in counts),
        "gen_ai.latency.time_in_queue": min(waited, default=None),
        "gen_ai.latency.time_to_first_token": min(first, default=None),
        "gen_ai.latency.e2e": generation.seconds,
        "lookahead.steps": sum(count.steps for count in counts),
        "lookahead.draft_tokens": sum(sent for sent, _ in drafts),
        "lookahead.accepted_draft_tokens": sum(accepted for _, accepted in drafts),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def open_tracing(endpoint: str) -> Tracing:
    """Return a `Tracing` that sends spans to an endpoint over HTTP, in OTLP's binary form.

    Raises:
        InvalidArgumentError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidArgumentError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed; {extra_hint('otel')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "lookahead"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
