"""Each feature, whole and streamed: the chunks add up to the whole answer in OpenAI's client."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from openai import LengthFinishReasonError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from server_process import ServerProcess

MODEL = "chatty"
PROMPT = "def add(a, b):"
TURN = [{"role": "user", "content": PROMPT}]


class Place(BaseModel):
    """Schema of answers and calls."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    large: bool


SCHEMA = Place.model_json_schema()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "go"}}

CHATS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 7},
    "max_completion_tokens": {"max_completion_tokens": 7},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "n": {"temperature": 0.9, "seed": 5, "n": 3},
    "stop": {"stop": [" ", "\n"], "max_tokens": 30},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": {"300": 100}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "tools, required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120},
    "tools, named": {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 120},
    "tools, one call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120},
    "tools, none": {"tools": [TOOL], "tool_choice": "none"},
    "tools, auto": {"tools": [TOOL], "tool_choice": "auto"},
    "prediction": {"prediction": {"type": "content", "content": "return a + b"}},
    "extensions": {"temperature": 1.1, "seed": 4, "extra_body": {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2}},
    "plain": {"extra_body": {"lookahead": {"enabled": False, "statistics": True}}},
    "preset": {"extra_body": {"lookahead": {"preset": "token_recycling", "step_budget": 9, "statistics": True}}},
}

FLATS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2},
    "prompts": {"prompt": [PROMPT, "class Stack:"]},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {"300": 5}},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": [" ", "\n"]},
    "token ids": {"prompt": [[1429], [300, 301]], "n": 2},
    "extensions": {"temperature": 1.1, "seed": 4, "extra_body": {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2}},
}


def content_of(choice: Any) -> dict[str, Any]:
    """Return the parts of a choice that a stream must repeat; identifiers of calls are random."""
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    tokens = [entry.token for entry in rated(choice)]
    return {"text": message.content or "", "calls": calls, "reason": choice.finish_reason, "tokens": tokens}


def rated(choice: Any) -> list[Any]:
    """Return the tokens of a choice and their alternatives, if log-probabilities were requested."""
    entries = (choice.logprobs.content or []) if choice.logprobs else []
    return [token for entry in entries for token in (entry, *entry.top_logprobs)]


def counted(usage: Any) -> dict[str, Any]:
    """Return the usage without the cached part of the prompt."""
    return usage.model_dump(exclude={"prompt_tokens_details"})


@pytest.mark.parametrize("feature", CHATS)
def test_chunks_of_a_chat_add_up_to_the_whole_answer(client: OpenAI, feature: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": TURN, "temperature": 0} | CHATS[feature]
    if "max_completion_tokens" not in request:
        request.setdefault("max_tokens", 16)
    whole = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        try:
            put_together: Any = stream.get_final_completion()
        except LengthFinishReasonError as cut:
            put_together = cut.completion
    assert [content_of(choice) for choice in put_together.choices] == [content_of(choice) for choice in whole.choices]
    assert counted(put_together.usage) == counted(whole.usage)
    for mine, other in zip(put_together.choices, whole.choices, strict=True):
        assert [each.logprob for each in rated(mine)] == pytest.approx(
            [each.logprob for each in rated(other)], abs=1e-4
        )
    if "extra_body" in request and "lookahead" in request["extra_body"]:
        *_, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        chunk: Any = last
        assert chunk.lookahead["tokens_per_step"] >= 1
        assert set(chunk.lookahead) == set(whole.lookahead)  # type: ignore[attr-defined]


@pytest.mark.parametrize("feature", FLATS)
def test_chunks_of_a_completion_add_up_to_the_whole_answer(client: OpenAI, feature: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | FLATS[feature]
    whole = client.completions.create(**request)
    texts, reasons, logprobs, usage = {}, {}, {}, None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else [])
    assert counted(usage) == counted(whole.usage)
    for choice in whole.choices:
        assert (texts[choice.index], reasons[choice.index]) == (choice.text, choice.finish_reason)
        expected = choice.logprobs.token_logprobs if choice.logprobs else []
        assert logprobs[choice.index] == pytest.approx(expected, abs=1e-4)


def test_a_class_as_response_format_is_parsed(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "temperature": 0}
    answer = client.chat.completions.parse(**request, messages=TURN, response_format=Place)  # type: ignore[arg-type]
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Place)
    with client.chat.completions.stream(**request, messages=TURN, response_format=Place) as stream:  # type: ignore[arg-type]
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert client.responses.parse(**request, input=PROMPT, text_format=Place).output_parsed == parsed
    with client.responses.stream(**request, input=PROMPT, text_format=Place) as events:
        assert events.get_final_response().output_parsed == parsed


def test_a_stream_is_whole_for_a_client_that_pauses(server: ServerProcess) -> None:
    fields = {"n": 8, "max_tokens": 30, "temperature": 1, "seed": 2, "logprobs": True, "top_logprobs": 20}
    body = {"model": MODEL, "messages": TURN, "logit_bias": {"0": -100}, **fields}
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)])
    with httpx.Client(transport=small, base_url=server.url, headers={"x-api-key": "a-key"}, timeout=600) as slow:
        whole = slow.post("/v1/chat/completions", json=body).json()["choices"]
        with slow.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            time.sleep(0.5)
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    for choice in whole:
        deltas = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        tokens = [token["token"] for one in deltas if one["logprobs"] for token in one["logprobs"]["content"]]
        assert "".join(one["delta"].get("content", "") for one in deltas) == choice["message"]["content"]
        assert tokens == [token["token"] for token in choice["logprobs"]["content"]]


def test_a_stream_of_http_1_0_has_no_chunks(server: ServerProcess, client: OpenAI) -> None:
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    body = json.dumps(fields | {"stream": True})
    host, port = server.url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.0", "X-Api-Key: a-key", "Content-Type: application/json"]
    with socket.create_connection((host, int(port))) as old:
        old.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
        answer = old.makefile("rb").read().partition(b"\r\n\r\n")[2]
    events = [line for line in answer.splitlines() if line]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]]
    assert "".join(texts) == client.completions.create(**fields).choices[0].text
