"""OpenTelemetry spans of requests; skipped without the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from lookahead.cli import main
from lookahead.server.app import create_app
from lookahead.server.guard import ServerSettings
from lookahead.server.tracing import Tracing
from server_process import served_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def traced(demo: Any) -> Iterator[tuple[TestClient, Any]]:
    """A client of a server in this process, and its exporter."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    app = create_app([served_model("demo", *demo)], ServerSettings(), Tracing(provider))
    with TestClient(app, base_url="http://localhost") as client:
        yield client, exporter


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(traced: tuple[TestClient, Any], stream: bool) -> None:
    client, exporter = traced
    exporter.clear()
    body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "n": 2, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = client.post("/v1/completions", json=body | {"lookahead": {"step_budget": 8}}, headers=headers)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    found = dict(span.attributes)
    expected = {
        "gen_ai.response.model": "demo",
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.completion_tokens": 48,
    }
    assert expected.items() <= found.items()
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    if not stream:
        assert found["gen_ai.usage.prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert 48 - found["lookahead.steps"] == found["lookahead.accepted_draft_tokens"] <= found["lookahead.draft_tokens"]
    latencies = [found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert latencies == sorted(latencies)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latencies[-1], abs=0.1)


def test_refused_requests_have_no_span(traced: tuple[TestClient, Any]) -> None:
    client, exporter = traced
    exporter.clear()
    assert client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 10**9}).status_code == 400
    assert not exporter.get_finished_spans()


def test_an_endpoint_needs_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"]) == 2
    assert "otel" in capsys.readouterr().err
