"""Faulty requests: status 400 with the reason, never 500; unusual fields without effect are accepted."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from lookahead.cli import main
from lookahead.cli.serve import read_api_keys
from lookahead.server.app import create_app
from lookahead.server.guard import ServerSettings
from lookahead.server.requests import ChatRequest, CompletionRequest
from server_process import ServerProcess, served_model

JSON = {"Content-Type": "application/json"}
TURN = [{"role": "user", "content": "def add(a, b):"}]
PLAIN = {"model": "chatty", "messages": TURN, "max_tokens": 8, "temperature": 0}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def called(arguments: str) -> str:
    """Return a conversation that holds a call with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps({**PLAIN, "messages": [{"role": "assistant", "tool_calls": [call]}, *TURN]})


def with_format(schema: str) -> str:
    return json.dumps(PLAIN)[:-1] + f', "response_format": {schema}}}'


def with_schema_text(schema: str) -> str:
    return json.dumps(PLAIN | {"structured_outputs": {"json": schema}})


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (called('{"a": "\\ud83d"}'), "messages", "half of a surrogate pair"),
        (called(f'{{"a": {nested(3000)}}}'), "messages", "nested too deep"),
        (called(f'{{"a": {nested(100_000)}}}'), "messages", "nested too deep"),
        (called(f'{{"a": 1{"0" * 5000}}}'), "messages", "more than 4300 digits"),
        (called("[1]"), "messages", "not a JSON object"),
        (with_format('{"type": "json_schema"}'), "response_format.json_schema", "json_schema is missing"),
        (with_format('{"type": "json_schema", "json_schema": {}}'), "response_format.json_schema.name", "is missing"),
        (with_format('{"type": "king"}'), "response_format", "json_schema"),
        (with_format("{}"), "response_format", "type"),
        (json.dumps(PLAIN)[:-1] + f', "metadata": {nested(900)}}}', None, "nested too deep"),
        (json.dumps(PLAIN)[:-1] + f', "metadata": {nested(3000)}}}', None, "nested too deep"),
        (json.dumps(PLAIN)[:-1] + f', "seed": 1{"0" * 5000}}}', None, "more than 4300 digits"),
        ('{"model": "\\ud800"}', None, "half of a surrogate pair"),
        (json.dumps(PLAIN | {"structured_outputs": {"json": {"$ref": "#"}}}), "structured_outputs", "refers to itself"),
        (json.dumps({**PLAIN, "structured_outputs": {"regex": "a{1000000}"}}), "structured_outputs", "too many"),
        (json.dumps(PLAIN | {"logit_bias": {"9" * 5000: 1}}), "logit_bias", "is not a token id"),
        (with_schema_text('{"const": "\\ud800"}'), "structured_outputs", "half of a surrogate pair"),
        (with_schema_text(f'{{"const": {nested(3000)}}}'), "structured_outputs", "nested too deep"),
        (with_schema_text(f'{{"minimum": 1{"0" * 5000}}}'), "structured_outputs", "a number has more than 4300 digits"),
        (with_schema_text("[]"), "structured_outputs", "json is not a JSON schema"),
    ],
)
def test_errors_name_the_field_and_the_reason(http: httpx.Client, body: str, param: str | None, message: str) -> None:
    answer = http.post(PATHS["chat"], content=body.encode(), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert "Value error" not in error["message"]
    assert len(error["message"]) < 400


def test_bodies_other_than_plain_json_are_distinguished(http: httpx.Client) -> None:
    packed = gzip.compress(json.dumps(PLAIN).encode())
    answer = http.post(PATHS["chat"], content=packed, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "'gzip'" in answer.json()["error"]["message"]
    answer = http.post(PATHS["chat"], content=packed, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the body is not valid JSON: byte 1 is not UTF-8",
    )


def answer_to(server: ServerProcess, data: bytes, end: bool = False) -> bytes:
    """Send all bytes, then read the server's whole answer; `end` closes the sending half first."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def head(size: int, version: str = "1.1") -> bytes:
    lines = ["Host: localhost", "Authorization: Bearer a-key", "Content-Type: application/json"]
    return "\r\n".join(
        [f"POST /v1/chat/completions HTTP/{version}", *lines, f"Content-Length: {size}\r\n\r\n"]
    ).encode()


def test_a_client_that_sends_too_much_reads_that_it_is_too_much(server: ServerProcess) -> None:
    for size in (400_000, 2_000_000):
        assert b" 413 " in answer_to(server, head(size) + b" " * size)
    waiting = head(2_000_000).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    assert answer_to(server, waiting).startswith(b"HTTP/1.1 413 "), "it has not to send the body"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_half_is_answered(server: ServerProcess, stream: bool) -> None:
    body = json.dumps({**PLAIN, "stream": stream}).encode()
    answer = answer_to(server, head(len(body)) + body, end=True)
    assert b"HTTP/1.1 200 OK" in answer
    assert b'"finish_reason":"length"' in answer
    assert answer_to(server, head(len(body)) + body[:-1], end=True) == b"", "the body is not whole"
    pipelined = answer_to(server, (head(len(body)) + body) * 5, end=True)
    assert pipelined.count(b"HTTP/1.1 200 OK") == pipelined.count(b'"finish_reason":"length"') == 5
    cut = answer_to(server, (head(len(body)) + body) * 3 + head(len(body)) + body[:-1], end=True)
    assert cut.count(b"HTTP/1.1 200 OK") == 3


def test_a_bad_memory_file_is_an_error_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory"
    path.write_text("something else")
    assert main(["serve", "--port", "0", "--memory", str(path)]) == 2
    assert "is no saved memory" in capsys.readouterr().err


def test_a_comment_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the f\u00f6rst client\nfirst\n#second\n")
    assert read_api_keys(path) == ("first",)


GREETING = {"greeting": "x"}

HARMLESS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat", {"top_k": -1, "temperature": 0.7, "seed": 3}, {"top_k": 0, "temperature": 0.7, "seed": 3}),
    ("chat", {"temperature": 1e-8}, {}),
    ("chat", {"temperature": 1, "top_p": 0}, {}),
    ("chat", {"stop": ""}, {}),
    ("chat", {"guided_decoding_backend": "xgrammar", "cache_prompt": True}, {}),
    ("chat", {"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ("chat", {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (
        "chat",
        {"enable_thinking": True, "chat_template_kwargs": {"greeting": "x"}},
        {"chat_template_kwargs": {"greeting": "x"}},
    ),
    ("completions", {"best_of": 2, "n": 2}, {"n": 2}),
    ("completions", {"regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}),
    ("completions", {"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("completions", {"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ("completions", {"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, {"guided_regex": "a+"}),
    ("completions", {"metadata": {"a": "b"}, "client_metadata": {"a": 1}}, {}),
    ("chat", {"client_metadata": {"a": 1}}, {}),
    ("chat", {"repeat_penalty": 1.3, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
]


@pytest.mark.parametrize(("place", "fields", "same"), HARMLESS)
def test_harmless_fields_change_nothing(http: httpx.Client, place: str, fields: Any, same: Any) -> None:
    prompt = {"messages": TURN} if place == "chat" else {"prompt": "def add(a, b):"}
    body = {"model": "chatty", "max_tokens": 8, "temperature": 0, **prompt}
    answers = [http.post(PATHS[place], json=body | more) for more in (fields, same)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    texts = [[choice.get("message", choice.get("text")) for choice in answer.json()["choices"]] for answer in answers]
    assert texts[0] == texts[1]


def test_two_names_of_one_field_have_one_value(http: httpx.Client) -> None:
    for fields, param in (
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, None),
        ({"regex": "a", "structured_outputs": {"regex": "b"}}, None),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
        ({"best_of": 3}, "best_of"),
    ):
        answer = http.post(PATHS["completions"], json={"model": "chatty", "prompt": "x", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_refusals_of_earlier_answers_are_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    request = ChatRequest.model_validate({"model": "x", "messages": [{"role": "assistant", "content": parts}]})
    assert request.messages[0].text == "ano"
    assert CompletionRequest.model_validate({"model": "x", "prompt": "x", "best_of": None}).best_of is None


PAGE = {"Origin": "https://page.example"}


@pytest.fixture(scope="module")
def open_to_pages(demo: Any) -> Iterator[TestClient]:
    settings = ServerSettings(cors_origin=("https://page.example",), api_keys=("k",))
    with TestClient(create_app([served_model("demo", *demo)], settings), base_url="http://localhost") as client:
        yield client


def test_pages_of_named_origins_may_read_answers(open_to_pages: TestClient, http: httpx.Client) -> None:
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = open_to_pages.options("/v1/chat/completions", headers=PAGE | wants)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert open_to_pages.options("/v1/models", headers=wants | {"Origin": "https://evil.example"}).status_code == 400
    for headers, status in ((PAGE, 401), (PAGE | {"Authorization": "Bearer k"}, 200)):
        answer = open_to_pages.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE["Origin"])
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=PAGE).headers, "off by default"


def test_head_equals_get_without_the_body(http: httpx.Client) -> None:
    for path in ("/health", "/", "/v1/models", "/page/page.js"):
        head_only, answer = http.head(path), http.get(path)
        assert (head_only.status_code, head_only.content) == (200, b"")
        assert head_only.headers["content-length"] == str(len(answer.content))


def test_probes_without_a_host_are_answered(demo: Any) -> None:
    with ServerProcess() as server:
        assert answer_to(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
