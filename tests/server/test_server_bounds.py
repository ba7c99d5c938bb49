"""Bounds of one request: a costly one is refused or ended, and others are answered meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import torch
from pydantic import ValidationError

from lookahead.server.grammar import GrammarProcessor, GrammarSource, compile_grammar, grammar_tokenizer
from lookahead.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from lookahead.server.responses_request import ResponsesRequest
from preloaded import Command
from server_process import ServerProcess

SHORT = {"model": "demo", "prompt": "def f(", "max_tokens": 2}
HOURS = {"type": "integer", "multipleOf": 4000037}
"""A schema that takes minutes and a gigabyte to prepare."""

AMBIGUOUS = "start: s\ns: " + " | ".join(" ".join("s" * count) for count in range(2, 20)) + ' | "a" | ""'
TIMEOUT = 8


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    limits = ("--max-rows", "8", "--queue", "8", "--timeout", str(TIMEOUT))
    with ServerProcess("--dtype", "float32", *limits) as process:
        yield process
        children = psutil.Process(process.process.pid).children()
    assert psutil.wait_procs(children, 60)[1] == [], "what tried grammars has ended with the server"


@pytest.fixture
def http(process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=120) as client:
        yield client


def structured(**constraint: Any) -> dict[str, Any]:
    return SHORT | {"max_tokens": 16, "structured_outputs": constraint}


def until_served(http: httpx.Client) -> None:
    """Wait until the server accepts a request again."""
    end = time.monotonic() + 120
    while http.post("/v1/completions", json=SHORT).status_code == 429:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_grammar_that_takes_minutes_holds_nobody_up(http: httpx.Client) -> None:
    boolean = structured(json={"type": "boolean"})
    assert http.post("/v1/completions", json=boolean).status_code == 200  # starts the process that tries grammars
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(http.post, "/v1/completions", json=structured(json=HOURS))
        time.sleep(0.2)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert json.loads(http.post("/v1/completions", json=boolean).json()["choices"][0]["text"]) in (True, False)
        assert not slow.done(), "they were answered before it was"
        answer = slow.result()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")
    assert "make it simpler" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"$ref": "#"}},
        {"json": {"enum": [f"value {number}" for number in range(70_000)]}},
        {"regex": "|".join(f"word{number}" for number in range(200_000))},
        {"grammar": "root ::= " + " | ".join(f'"w{number}"' for number in range(8_000))},
        {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {
            "grammar": "start: "
            + " | ".join(f"r{n}" for n in range(5000))
            + "".join(f'\nr{n}: "k" r0?' for n in range(5000))
        },
        {"grammar": AMBIGUOUS},
    ],
    ids=["loop", "values", "length", "alternatives", "nesting", "rules", "ambiguous"],
)
def test_grammars_beyond_the_limits_are_refused(http: httpx.Client, constraint: Any) -> None:
    body = structured(**constraint) | {"max_tokens": 200, "logit_bias": {"0": -100}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_drafts_for_an_ambiguous_grammar_end(demo: Any) -> None:
    _, tokenizer = demo
    tokens = grammar_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    source = GrammarSource(compile_grammar(AMBIGUOUS, tokens, "grammar"))
    with pytest.raises(ValueError, match="the grammar"):
        source.permits([letter] * 16, range(16))
    processor, text = GrammarProcessor(compile_grammar(AMBIGUOUS, tokens, "grammar"), 0), torch.tensor([[letter] * 16])
    with pytest.raises(ValueError, match="the grammar"):
        processor(text, torch.zeros(1, len(tokenizer)))


def test_detokenize_is_bounded_by_the_models_length(http: httpx.Client) -> None:
    most = http.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"]
    assert http.post("/detokenize", json={"tokens": [5] * most}).status_code == 200
    answer = http.post("/detokenize", json={"tokens": [5] * (most + 1)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_queue_is_that_of_all_that_work(http: httpx.Client) -> None:
    endless = {**SHORT, "max_tokens": 1500, "n": 16, "stream": True, "temperature": 1, "logit_bias": {"0": -100}}
    requests = {
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
        "/v1/completions": SHORT,
        "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    }
    with http.stream("POST", "/v1/completions", json=endless) as answer:
        chunks = answer.iter_bytes()
        next(chunks)
        assert [http.post(path, json=body).status_code for path, body in requests.items()] == [429] * 4
        assert [http.get(path).status_code for path in ("/health", "/load", "/metrics")] == [200] * 3
    until_served(http)
    assert [http.post(path, json=body).status_code for path, body in requests.items()] == [200] * 4


def test_a_client_that_never_reads_is_ended(process: ServerProcess, http: httpx.Client) -> None:
    large = {"logprobs": 20, "lookahead": {"steps": True, "step_budget": 16}, "logit_bias": {"0": -100}}
    body = json.dumps({**SHORT, "max_tokens": 1500, "n": 16, "stream": True, "temperature": 1, **large}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = process.url.removeprefix("http://").split(":")
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.connect((host, int(port)))
        silent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        silent.settimeout(120)
        assert silent.recv(1)  # the answers have begun
        assert http.post("/v1/completions", json=SHORT).status_code == 429
        until_served(http)


def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    server = Command(["serve", "--port", "0"], {2: theirs})
    os.close(theirs)
    log = b""
    while b" at http" not in log or not log.endswith(b"\n"):
        log += os.read(ours, 4096)
    url = log.decode().rsplit(" ", 1)[1].strip()
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(100):
            assert client.get(f"/none/{number}/{'x' * 100}").status_code == 404
        assert client.post("/v1/completions", json=SHORT).status_code == 200
    os.close(ours)
    server.kill()
    server.wait(60)


def test_repeated_errors_in_a_list_are_reported_once() -> None:
    part = {"type": "no such"}
    user = {"role": "user", "content": [part] * 1000}
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (CompletionRequest, {"model": "x", "prompt": [-1] * 1000}),
        (CompletionRequest, {"model": "x", "prompt": [[-1]] * 1000}),
        (CompletionRequest, {"model": "x", "prompt": "x"} | {f"field_{number}": 1 for number in range(1000)}),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
        (ChatRequest, {"model": "x", "messages": [user]}),
        (ChatRequest, {"model": "x", "messages": [{}] * 1000}),
        (ResponsesRequest, {"model": "x", "input": [user] * 1000}),
    ]
    for kind, body in bodies:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() < 30, kind


@pytest.mark.parametrize(
    "prompt", [[""] * 70_000, [[1]] * 70_000, [1] * 270_000, {"a": [{}] * 70_000}, ['"\\', "x"] * 40_000]
)
def test_bodies_of_too_many_values_are_refused_before_they_are_read(http: httpx.Client, prompt: Any) -> None:
    answer = http.post("/v1/completions", json={"model": "demo", "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")


def test_texts_may_have_any_number_of_commas(http: httpx.Client) -> None:
    text = ',[{"\\\\' * 200_000
    answer = http.post("/v1/completions", json={"model": "demo", "prompt": text})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_all_bodies_together_are_bounded() -> None:
    with ServerProcess("--max-body-bytes", "10000") as process:
        host, port = process.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9900\r\n\r\n"
        opened = [socket.create_connection((host, int(port)), timeout=60) for _ in range(34)]
        for connection in opened:
            connection.sendall(head + b" " * 9899)
        answered, _, _ = select.select(opened, [], [], 60)
        assert b" 429 " in answered[0].recv(4096)
        for connection in opened:
            connection.close()
