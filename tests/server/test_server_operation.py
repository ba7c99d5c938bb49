"""Keys, limits, clients that go away, metrics, the log, and how a server ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from openai import AuthenticationError, OpenAI, RateLimitError
from prometheus_client.parser import text_string_to_metric_families

from lookahead import Engine, LookaheadConfig
from lookahead.cli import main
from lookahead.cli.serve import read_api_keys
from lookahead.errors import InvalidArgumentError
from lookahead.server.app import create_app
from lookahead.server.grammar import GrammarProcessor
from lookahead.server.guard import ServerSettings, write_line
from lookahead.server.process import Server, warning
from lookahead.server.served_model import ServedModel
from server_process import ServerProcess, served_model

PROMPT = "def add(a, b):"
LEFT = "lookahead:disconnected_requests_total"
LONG = {"model": "chatty", "prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "logit_bias": {"0": -100}}


def value_of(http: httpx.Client, name: str, **labels: str) -> float:
    """Return the value of a metric."""
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def idle(http: httpx.Client) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(value_of(http, name) for name in names)


def test_requests_need_the_api_key(server: ServerProcess, client: OpenAI) -> None:
    for key in ("wrong", "a-ke", "a-key-", "ä"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert answer.status_code == 401
    with pytest.raises(AuthenticationError, match="API key"):
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    for scheme, status in (("", 401), ("Basic ", 401), ("bearer ", 200), ("BEARER  ", 200)):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"{scheme}a-key"})
        assert answer.status_code == status, scheme
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert client.models.list().data
    other = OpenAI(base_url=f"{server.url}/v1", api_key="another-key", max_retries=0)
    assert other.models.list().data


def test_bodies_are_bounded(server: ServerProcess, http: httpx.Client) -> None:
    large = b'{"model": "chatty", "prompt": "' + b"x" * 300_000 + b'"}'
    answer = http.post("/v1/completions", content=large)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    parts = (large[start : start + 10_000] for start in range(0, len(large), 10_000))
    assert http.post("/v1/completions", content=parts).status_code == 413  # without a Content-Length
    stops = {"model": "chatty", "prompt": "x", "stop": ["y"] * 50_000}
    assert http.post("/v1/completions", json=stops).json()["error"]["param"] == "stop"
    answer = http.post("/v1/completions", json={"model": "chatty", "prompt": "x " * 100_000})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_silent_connections_are_closed(server: ServerProcess, http: httpx.Client) -> None:
    address = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-key\r\nContent-Length: 50\r\n\r\n{"
    silent = [socket.create_connection((address[0], int(address[1])), timeout=600) for _ in range(20)]
    for number, connection in enumerate(silent):
        connection.sendall((b"", b"POST /v1", head)[number % 3])
    assert http.get("/health").status_code == 200
    for number, connection in enumerate(silent):
        reply = b"".join(iter(lambda c=connection: c.recv(4096), b""))  # type: ignore[misc]
        assert (b"408" in reply) is (number % 3 == 2)
        connection.close()


def test_a_full_queue_answers_429(client: OpenAI, http: httpx.Client) -> None:
    wait_for(lambda: idle(http))
    with client.completions.create(**LONG, n=64, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(RateLimitError) as raised:
            client.completions.create(model="chatty", prompt=PROMPT)
        assert int(raised.value.response.headers["Retry-After"]) > 0
    wait_for(lambda: idle(http))
    assert client.completions.create(model="chatty", prompt=PROMPT, max_tokens=1).choices


def test_a_client_that_leaves_is_cancelled(http: httpx.Client) -> None:
    wait_for(lambda: idle(http))
    before, left = (value_of(http, name) for name in ("vllm:generation_tokens_total", LEFT))
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_bytes())
    wait_for(lambda: idle(http))
    assert value_of(http, "vllm:generation_tokens_total") - before < 1500
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**LONG, "n": 8}, timeout=1)
    wait_for(lambda: idle(http))
    assert value_of(http, "vllm:generation_tokens_total") - before < 8 * 1500
    wait_for(lambda: value_of(http, LEFT) == left + 2)
    assert http.post("/v1/completions", json={**LONG, "max_tokens": 2, "stream": True}).text.endswith("[DONE]\n\n")
    assert value_of(http, LEFT) == left + 2


def test_metrics_and_log_report_requests(server: ServerProcess, client: OpenAI, http: httpx.Client) -> None:
    wait_for(lambda: idle(http))
    names = {
        "tokens": "vllm:generation_tokens_total",
        "prompt": "vllm:prompt_tokens_total",
        "steps": "lookahead:steps_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "sent": "vllm:spec_decode_num_draft_tokens_total",
        "first": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "requests": "vllm:e2e_request_latency_seconds_count",
        "queued": "vllm:request_queue_time_seconds_count",
        "first tokens": "vllm:time_to_first_token_seconds_count",
        "later tokens": "vllm:inter_token_latency_seconds_count",
    }
    before = {key: value_of(http, name) for key, name in names.items()}
    answer = client.completions.with_raw_response.create(
        model="chatty",
        prompt=PROMPT,
        max_tokens=20,
        temperature=0,
        user="somebody",
        extra_body={"lookahead": {"statistics": True}},
    )
    steps = answer.parse().lookahead["steps"]  # type: ignore[attr-defined]
    grown = {key: value_of(http, name) - before[key] for key, name in names.items()}
    assert grown["tokens"] == 20
    assert grown["first tokens"] == 1
    assert 0 < grown["later tokens"] < 20, "those of the first step have no step before them"
    assert grown["prompt"] == answer.parse().usage.prompt_tokens  # type: ignore[union-attr]
    assert grown["steps"] == steps
    assert grown["requests"] == grown["queued"] == 1
    assert grown["accepted"] >= grown["first"] > 0
    assert 0 < grown["drafts"] <= steps
    drafted = answer.parse().metrics["speculative_decoding"]  # type: ignore[attr-defined]
    names_there = {"drafts": "num_spec_steps", "accepted": "num_accepted_draft_tokens", "sent": "num_draft_tokens"}
    assert {key: drafted[name] for key, name in names_there.items()} == {key: grown[key] for key in names_there}
    assert sum(drafted["acceptance_histogram"]) == grown["drafts"]
    assert sum(count * steps for count, steps in enumerate(drafted["acceptance_histogram"])) == grown["accepted"]
    assert drafted["mean_acceptance_length"] == pytest.approx(1 + grown["accepted"] / grown["drafts"])
    assert drafted["draft_acceptance_rate"] == pytest.approx(grown["accepted"] / grown["sent"])
    number = answer.headers["x-request-id"]
    wait_for(lambda: any(number in line for line in server.lines))
    (line,) = [json.loads(line) for line in server.lines if number in line]
    assert line["path"] == "/v1/completions"
    assert (line["status"], line["user"], line["completion_tokens"], line["steps"]) == (200, "somebody", 20, steps)
    assert line["finish_reasons"] == ["length"]
    assert "a-key" not in "".join(server.lines)


@pytest.fixture(scope="module")
def served(demo: Any) -> ServedModel:
    return served_model("demo", *demo)


def test_kv_memory_is_bounded_and_reported(http: httpx.Client) -> None:
    wait_for(lambda: idle(http))
    assert "vllm:kv_cache_usage_perc{" in http.get("/metrics").text
    assert value_of(http, "vllm:kv_cache_usage_perc") == 0
    limit = value_of(http, "lookahead:kv_limit_bytes")
    assert 0 < limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    assert http.get("/load").json()["kv_limit_bytes"] == limit
    assert 0 <= value_of(http, "lookahead:prefix_bytes") <= 2**30
    assert value_of(http, "process_resident_memory_bytes") > 0


@pytest.mark.parametrize("apart", [False, True])
def test_keys_have_their_own_memory_if_required(demo: Any, apart: bool) -> None:
    settings = ServerSettings(api_keys=("one", "other"), memory_per_key=apart)
    request = {
        "model": "demo",
        "prompt": PROMPT * 4,
        "max_tokens": 32,
        "temperature": 0,
        "lookahead": {"statistics": True},
    }
    engine = Engine(demo[0], LookaheadConfig(step_budget=16), kv_bytes=2**28)
    served = replace(served_model("demo", *demo), engine=engine)
    with TestClient(create_app([served], settings), base_url="http://localhost") as client:

        def answer(key: str) -> tuple[int, int]:
            body = client.post("/v1/completions", json=request, headers={"Authorization": f"Bearer {key}"}).json()
            return body["lookahead"]["steps"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = answer("one")
        assert (answer("other") == first) is apart
        assert answer("one") < first


def test_a_memory_for_each_key_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--memory-per-key"]) == 2
    assert "--memory-per-key needs --api-key-file" in capsys.readouterr().err


def test_a_request_that_takes_too_long_is_given_up(served: ServedModel) -> None:
    with TestClient(create_app([served], ServerSettings(timeout=0.3)), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json={**LONG, "model": "demo", "n": 4})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        streamed = client.post("/v1/completions", json={**LONG, "model": "demo", "stream": True})
        assert "longer than this server allows" in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")


class Fails:
    """Does what another object does, but for one method, which fails."""

    def __init__(self, owner: Any, method: str, error: Exception) -> None:
        self._owner, self._method, self._error = owner, method, error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._method else getattr(self._owner, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._fail() if self._method == "__call__" else self._owner(*arguments, **options)

    def _fail(self, *arguments: Any, **options: Any) -> Any:
        raise self._error


def test_errors_inside_a_stream_are_logged(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = demo
    served = served_model("demo", model, Fails(tokenizer, "decode", RuntimeError("this tokenizer is broken")))
    with TestClient(create_app([served], ServerSettings()), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json={"model": "demo", "prompt": "x", "stream": True})
    assert "the server failed; its log says why" in answer.text
    assert "RuntimeError: this tokenizer is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "method", "stage"),
    [("tokenizer", "__call__", "prepare"), ("engine", "submit", "submit"), ("tokenizer", "decode", "answer")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_log_names_errors_and_their_location(
    demo: Any, capsys: pytest.CaptureFixture[str], part: str, method: str, stage: str, stream: bool
) -> None:
    served = served_model("demo", *demo)
    served = replace(served, **{part: Fails(getattr(served, part), method, KeyError("this model is broken"))})
    app = create_app([served], ServerSettings())
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        request = {"model": "demo", "prompt": "x", "max_tokens": 4, "stream": stream}
        answer = client.post("/v1/completions", json=request)
        assert answer.status_code == 500 or (stream and stage == "answer")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    entry = json.loads(lines[-1])
    assert entry["stage"] == stage
    assert entry["error"].startswith("builtins.KeyError: 'this model is broken'")
    assert "test_server_operation.py:" in entry["error"]


def test_the_log_has_the_tokens_of_an_answer_that_is_no_json(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = demo
    served = served_model("demo", model, tokenizer)
    body = {"model": "demo", "prompt": "x", "temperature": 0, "lookahead": {"enabled": False}}
    shaped = {"structured_outputs": {"json": {"type": "boolean"}}}
    with TestClient(create_app([served], ServerSettings()), base_url="http://localhost") as client:

        def logged(**fields: Any) -> dict[str, Any]:
            text = client.post("/v1/completions", json=body | fields).json()["choices"][0]["text"]
            lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
            return {"text": text, **json.loads(lines[-1])}

        assert "no_json" not in logged(**shaped)
        ids = tokenizer('{"a": ')["input_ids"]

        def forget(processor: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            place = input_ids.shape[1] - 1
            forced = torch.full_like(scores, -torch.inf)
            forced[:, ids[place] if place < len(ids) else tokenizer.eos_token_id] = 0
            return forced

        monkeypatch.setattr(GrammarProcessor, "__call__", forget)
        entry = logged(**shaped)
        assert entry["text"] == '{"a": '
        (fault,) = entry["no_json"]
        assert (fault["index"], fault["finish_reason"]) == (0, "stop")
        assert fault["token_ids"] == [*ids, tokenizer.eos_token_id]
        assert fault["steps"] == len(ids) + 1
        assert "no_json" not in logged(**shaped, max_tokens=2), "it was cut"
        assert "no_json" not in logged(structured_outputs={"regex": "x"})


def test_a_server_goes_on_where_its_log_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        for stream in (full, None):
            with redirect_stderr(stream):
                write_line("x")
        with suppress(OSError):
            full.close()


def test_a_port_in_use_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # enough to look like a model
        (tmp_path / name).write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "--model", str(tmp_path), "--port", str(other.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


class Running:
    """A server in a thread; the test calls its signal handler."""

    def __init__(self, app: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(uvicorn.Config(app, log_config=None), app.state.service.stop)
        self.thread = Thread(target=self.server.run, args=([listener],))
        self.thread.start()
        wait_for(lambda: self.server.started)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


def test_the_second_signal_leaves_nobody_without_an_answer(demo: Any) -> None:
    served = served_model("demo", *demo)
    running = Running(create_app([served], ServerSettings()))
    request = LONG | {"model": "demo", "n": 4}
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=running.url, timeout=60) as client:
        whole = threads.submit(client.post, "/v1/completions", json=request)
        with client.stream("POST", "/v1/completions", json=request | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_for(lambda: served.engine.load.running == 8)
            running.signal()
            wait_for(lambda: not running.server.servers[0].is_serving())
            next(line for line in lines if line)  # the answers continue
            running.signal()
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert rest[-1] == "data: [DONE]"
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert not running.server.force_exit


def test_requests_after_a_stop_get_503(demo: Any) -> None:
    served = served_model("demo", *demo)
    app = create_app([served], ServerSettings())
    with TestClient(app, base_url="http://localhost") as client:
        app.state.service.stop()
        answer = client.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["connection"] == "close"


def test_the_third_signal_stops_at_once() -> None:
    server = Server(uvicorn.Config("unused"), lambda: None)
    server.handle_exit(signal.SIGTERM, None)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
    logger = logging.getLogger("uvicorn.error")
    assert logger.disabled  # interrupted requests are not errors
    logger.disabled = False


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("127.0.0.1:80", {}, 200),
        ("LOCALHOST:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("evil.example", {}, 403),
        ("127.0.0.1.evil.example:8000", {}, 403),
        ("[", {}, 403),
        ("", {}, 403),
        ("name.example", {"host": "0.0.0.0"}, 200),
        ("name.example", {"api_keys": ("k",)}, 200),
    ],
)
def test_a_web_page_cannot_reach_a_local_server_under_its_own_name(
    served: ServedModel, host: str, settings: dict[str, Any], status: int
) -> None:
    client = TestClient(create_app([served], ServerSettings(**settings)))
    answer = client.get("/health", headers={"Host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "invalid_host"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("good\nsch\u00f6n\n", "line 2 has characters that cannot be sent"),
        ("a\tkey", "line 1 has"),
        ("\n", "contains no key"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused(tmp_path: Path, data: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(data, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=message):
        read_api_keys(path)


def test_keys_are_read_from_files_of_any_editor(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n second \r\n")
    assert read_api_keys(path) == ("first", "second")
    assert read_api_keys(None) == ()


@pytest.mark.parametrize(
    ("host", "keys", "warned"), [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("::1", (), False)]
)
def test_an_open_server_warns(host: str, keys: tuple[str, ...], warned: bool) -> None:
    assert (warning(ServerSettings(host=host, api_keys=keys)) is not None) is warned


@pytest.mark.parametrize(("options", "noted"), [([], True), (["--invariant"], False)])
def test_the_start_says_that_drafts_change_texts_in_16_bits(options: list[str], noted: bool) -> None:
    with ServerProcess("--device", "cpu", "--dtype", "bfloat16", *options) as process:
        assert ("--invariant or --dtype float32" in "".join(process.lines)) == noted
