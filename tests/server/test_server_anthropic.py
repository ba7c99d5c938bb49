"""Anthropic's protocol: requests as its clients send them, and the official client if it is installed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from server_process import ServerProcess

PROMPT = "def add(a, b):"
TURN = [{"role": "user", "content": PROMPT}]
ASKED: dict[str, Any] = {"model": "chatty", "max_tokens": 16, "messages": TURN, "temperature": 0}
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}
TOOL = {"name": "place", "description": "A place.", "input_schema": PLACE}


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**ASKED, **fields})


def test_texts_equal_a_chat(http: httpx.Client, client: OpenAI) -> None:
    answer = http.post("/v1/messages", json=ASKED).json()
    expected = chat(client)
    assert answer["content"] == [{"type": "text", "text": expected.choices[0].message.content}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["usage"]["output_tokens"] == 16
    input_tokens = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert input_tokens == expected.usage.prompt_tokens
    assert http.post("/v1/messages/count_tokens", json={**ASKED, "max_tokens": None}).json() == {
        "input_tokens": input_tokens
    }
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    more = {"system": system, "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "top_k": 1}
    answer = http.post("/v1/messages", json=ASKED | more).json()
    expected = chat(client, messages=[{"role": "system", "content": "Be brief."}, *TURN])
    assert answer["content"][0]["text"] == expected.choices[0].message.content
    text = expected.choices[0].message.content
    answer = http.post("/v1/messages", json=ASKED | more | {"stop_sequences": ["never", text[9:12]]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[9:12])


def test_a_conversation_with_a_call_is_that_of_a_chat(http: httpx.Client, client: OpenAI) -> None:
    choice = {"type": "tool", "name": "place"}
    request = ASKED | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
    answer = http.post("/v1/messages", json=request).json()
    (call,) = answer["content"]
    assert (answer["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "place")
    assert set(call["input"]) == {"name", "large"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Yes."}]}
    history = [*TURN, {"role": "assistant", "content": answer["content"]}]
    history.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
    answer = http.post("/v1/messages", json=ASKED | {"messages": history}).json()
    made = {"id": "1", "type": "function", "function": {"name": "place", "arguments": json.dumps(call["input"])}}
    same = [
        *TURN,
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ]
    assert answer["content"][0]["text"] == chat(client, messages=same).choices[0].message.content
    begun = [*TURN, {"role": "assistant", "content": "    return"}]
    answer = http.post("/v1/messages", json=ASKED | {"messages": begun}).json()
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    assert answer["content"][0]["text"] == chat(client, messages=begun, extra_body=extra).choices[0].message.content


def test_streams_are_events(http: httpx.Client) -> None:
    whole = http.post("/v1/messages", json=ASKED).json()
    lines = http.post("/v1/messages", json=ASKED | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [
        event["type"] for event in events
    ]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"container": "x"}, "this server runs no code"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    ],
)
def test_errors_have_their_form(http: httpx.Client, fields: Any, message: str) -> None:
    answer = http.post("/v1/messages", json=ASKED | fields)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


def test_the_official_client(server: ServerProcess, client: OpenAI) -> None:
    anthropic = pytest.importorskip("anthropic")
    plain = {name: value for name, value in ASKED.items() if name != "temperature"}  # the client has no such argument
    greedy: dict[str, Any] = plain | {"extra_body": {"temperature": 0}}
    reached = anthropic.Anthropic(base_url=server.url, api_key="a-key", max_retries=0)
    answer = reached.messages.create(**greedy)
    assert answer.content[0].text == chat(client).choices[0].message.content
    with reached.messages.stream(**greedy) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().usage.output_tokens == 16
    request = greedy | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with reached.messages.stream(**request | {"max_tokens": 120}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert set(final.content[0].input) == {"name", "large"}
    assert reached.messages.count_tokens(model="chatty", messages=TURN).input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        reached.messages.create(**plain, extra_body={"temperature": 3})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**greedy)
