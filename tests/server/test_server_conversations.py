"""Conversations of several turns with function calls, and parsing of reasoning, channels and calls in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from openai import OpenAI

from lookahead.server.app import create_app
from lookahead.server.guard import ServerSettings
from lookahead.server.tools import HERMES, parse_calls
from server_process import served_model

ARGUMENTS = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
TURN = [{"role": "user", "content": "def add(a, b):"}]
FORM = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def test_chats_carry_function_calls_and_results(client: OpenAI) -> None:
    """A call, its result, and a structured answer; whole and streamed."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    request: dict[str, Any] = {"model": "chatty", "temperature": 0, "tools": [WEATHER, CLOCK]}
    first = client.chat.completions.create(**request, messages=TURN, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 C"}
    request |= {
        "messages": [*TURN, message, result],
        "response_format": form,
        "logit_bias": {str(token_of(client, "<")): -100},
    }
    second = client.chat.completions.create(**request, max_tokens=40)
    assert set(json.loads(second.choices[0].message.content or "")) == {"a"}
    with client.chat.completions.stream(**request, max_tokens=40) as stream:
        assert stream.get_final_completion().choices[0].message.content == second.choices[0].message.content


def token_of(client: OpenAI, text: str) -> int:
    """The first token of a text."""
    answer = client.post("../tokenize", body={"prompt": text}, cast_to=object)
    return int(answer["tokens"][0])  # type: ignore[index]


def test_responses_carry_function_calls_and_results(client: OpenAI) -> None:
    flat = [{"type": "function", **WEATHER["function"]}, {"type": "function", **CLOCK["function"]}]
    request: dict[str, Any] = {"model": "chatty", "temperature": 0, "tools": flat}
    begun = request | {"input": TURN, "tool_choice": {"type": "function", "name": "weather"}}
    first = client.responses.create(**begun)
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"place", "unit"}
    assert first.status == "completed"
    with client.responses.stream(**begun) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response().output[0]
    assert "response.function_call_arguments.done" in kinds
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    history = [*TURN, *(item.model_dump() for item in first.output), result]
    last = client.responses.create(**request, input=history, tool_choice="none", max_output_tokens=8)
    messages = [
        *TURN,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "12 C"},
    ]
    same = client.chat.completions.create(model="chatty", temperature=0, messages=messages, max_tokens=8)  # type: ignore[arg-type]
    assert last.output_text == same.choices[0].message.content
    assert last.usage is not None
    assert same.usage is not None
    assert last.usage.input_tokens == same.usage.prompt_tokens


MARKS = ["<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} like [TOOL_CALLS]f[ARGS]{}{% endif %}"
    "assistant: {% if reasoning_effort == 'low' %}<think></think>{% elif reasoning_effort %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def special(demo: Any) -> Iterator[tuple[TestClient, Any]]:
    """A model with special tokens as marks, like Mistral's."""
    model, tokenizer = deepcopy(demo[0]), deepcopy(demo[1])
    torch.manual_seed(0)  # embeddings of the new tokens are random
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = TEMPLATE
    served = served_model("x", model, tokenizer)
    with TestClient(create_app([served], ServerSettings()), base_url="http://localhost") as made:
        yield made, tokenizer


def ask(client: TestClient, **fields: Any) -> Any:
    request = {"model": "x", "messages": TURN, "temperature": 0, "max_tokens": 300} | fields
    answer = client.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_calls_between_special_tokens_are_parsed(special: tuple[TestClient, Any]) -> None:
    client, tokenizer = special
    choice = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert set(json.loads(call["function"]["arguments"])) == {"place", "unit"}
    begin = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    called = ask(client, tools=[CLOCK], logit_bias={str(begin): 100}, parallel_tool_calls=False)
    assert [each["function"]["name"] for each in called["message"]["tool_calls"]] == ["clock"]
    text = ask(client, tools=[CLOCK], logit_bias={str(begin): -100}, max_tokens=20)["message"]
    assert text["content"]
    assert "tool_calls" not in text


def test_reasoning_between_special_tokens_is_parsed(special: tuple[TestClient, Any]) -> None:
    client, tokenizer = special
    end = str(tokenizer.convert_tokens_to_ids("</think>"))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    for fields in ({}, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}):
        message = ask(client, response_format=form, logit_bias={end: 100}, **fields)["message"]
        assert set(json.loads(message["content"])) == {"a"}
    never = ask(client, reasoning_effort="high", logit_bias={end: -100}, max_tokens=8)["message"]
    assert never["content"] == ""
    assert never["reasoning_content"]
    request = {"model": "x", "input": TURN, "reasoning": {"effort": "high"}, "max_output_tokens": 8, "temperature": 0}
    answer = client.post("/v1/responses", json=request | {"logit_bias": {end: -100}}).json()
    (item,) = answer["output"]
    assert item["type"] == "reasoning"
    assert item["content"][0]["text"] == never["reasoning_content"]
    answered = client.post("/v1/responses", json=request | {"logit_bias": {end: 100}, "max_output_tokens": 40}).json()
    assert [item["type"] for item in answered["output"]] == ["message"]


CHANNELS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }} in <|channel|>commentary{% endif %}"
    "<|start|>assistant{# then <|channel|>analysis or <|channel|>final #}"
)


def test_answers_in_channels(demo: Any) -> None:
    """GPT-OSS's form: channels between special tokens, some of them end tokens."""
    model, tokenizer = deepcopy(demo[0]), deepcopy(demo[1])
    torch.manual_seed(0)
    marks = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "return", "call")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))
    model.generation_config.eos_token_id = [ids["<|return|>"], ids["<|call|>"]]
    tokenizer.chat_template = CHANNELS
    served = served_model("x", model, tokenizer)
    bias = {str(ids["<|channel|>"]): 100, str(ids["<|end|>"]): 20, str(ids["<|return|>"]): 10}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    with TestClient(create_app([served], ServerSettings()), base_url="http://localhost") as client:
        called = ask(client, tools=[WEATHER], tool_choice="required")
        (call,) = called["message"]["tool_calls"]
        assert called["finish_reason"] == "tool_calls"
        assert set(json.loads(call["function"]["arguments"])) == {"place", "unit"}
        formed = ask(client, response_format=form, logit_bias=bias)["message"]
        assert set(json.loads(formed["content"])) == {"a"}
        begun = ask(client, tools=[CLOCK], logit_bias={str(ids["<|channel|>"]): 100}, max_tokens=30)["message"]
        parts = [begun.get("reasoning_content"), begun["content"], begun.get("tool_calls")]
        assert any(parts)
        assert not any("<|" in text for text in parts[:2] if text)


CODEX = json.loads((Path(__file__).parent / "codex_request.json").read_text())
"""Request of Codex CLI 0.171 after two calls, with shortened texts."""


def flat_messages() -> list[dict[str, Any]]:
    """Return the same conversation as chat messages."""

    def call(number: int, name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    inputs = CODEX["input"]
    begin = [
        {"role": item["role"], "content": "".join(part["text"] for part in item["content"])} for item in inputs[:4]
    ]
    first, second = call(1, "exec_command", '{"cmd": "ls"}'), call(2, "multi_agent_v1__close_agent", '{"target": "x"}')
    return [
        *begin,
        {"role": "assistant", "content": "", "reasoning_content": "Let me look.", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "call_1", "content": inputs[6]["output"]},
        {"role": "assistant", "content": "Now the other.", "tool_calls": [second]},
        {"role": "tool", "tool_call_id": "call_2", "content": inputs[9]["output"]},
    ]


@pytest.mark.parametrize(("items", "messages"), [(4, 4), (7, 6), (10, 8)])
def test_codex_is_answered_as_a_chat_is(client: OpenAI, items: int, messages: int) -> None:
    request = CODEX | {"model": "chatty", "input": CODEX["input"][:items], "temperature": 0, "max_output_tokens": 24}
    answer = streamed(client, request)
    assert [tool["type"] for tool in answer["tools"]] == ["function", "function", "namespace"], "web_search is left out"
    functions = [tool for tool in CODEX["tools"] if tool["type"] == "function"]
    functions += [
        {**tool, "name": f"multi_agent_v1__{tool['name']}"}
        for namespace in CODEX["tools"]
        for tool in namespace.get("tools", ())
    ]
    names = ("name", "description", "parameters")
    tools: Any = [{"type": "function", "function": {name: tool[name] for name in names}} for tool in functions]
    same = client.chat.completions.create(
        model="chatty", messages=flat_messages()[:messages], tools=tools, temperature=0, max_tokens=24
    )
    assert same.usage is not None
    assert answer["usage"]["input_tokens"] == same.usage.prompt_tokens
    assert answer["output"][0]["content"][0]["text"] == same.choices[0].message.content


def streamed(client: OpenAI, request: dict[str, Any]) -> Any:
    """Return the response at the end of a stream."""
    with client._client.stream("POST", "responses", json=request, headers=client.auth_headers) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return json.loads(lines[-1].removeprefix("data: "))["response"]


def test_calls_in_namespaces_come_back_with_them(client: OpenAI, http: httpx.Client) -> None:
    some = {"type": "allowed_tools", "mode": "required"}
    choice = some | {"tools": [{"type": "function", "name": "multi_agent_v1__close_agent"}]}
    target = {"type": "object", "properties": {"target": {"enum": ["x"]}}, "required": ["target"]}
    inner = {"type": "function", "name": "close_agent", "parameters": target | {"additionalProperties": False}}
    space = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [inner]}
    request = CODEX | {"model": "chatty", "tools": [space, *CODEX["tools"][:1]], "tool_choice": choice}
    answer = streamed(client, request | {"parallel_tool_calls": False})
    (call,) = answer["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent_v1", "close_agent")
    assert call["arguments"] == '{"target": "x"}'  # like templates
    assert answer["tool_choice"] == choice
    for field, value in (
        ("tools", [{"type": "custom", "name": "apply_patch"}]),
        ("tool_choice", {"type": "web_search"}),
        ("tools", [inner, inner]),
        ("tool_choice", some | {"tools": [{"type": "function", "name": "other"}]}),
    ):
        answer = http.post("/v1/responses", json=request | {field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


def test_responses_repeat_request_fields(client: OpenAI) -> None:
    fields: dict[str, Any] = {"metadata": {"a": "b"}, "instructions": "Be brief.", "truncation": "auto"}
    answer = client.responses.create(model="chatty", input="x", max_output_tokens=4, **fields)
    assert {name: getattr(answer, name) for name in fields} == fields
    with client.responses.stream(model="chatty", input="x", max_output_tokens=4, **fields) as events:
        assert next(iter(events)).response.metadata == {"a": "b"}  # type: ignore[union-attr]
    plain = client.responses.create(model="chatty", input="x", max_output_tokens=4)
    assert (plain.metadata, plain.instructions, plain.truncation) == ({}, None, "disabled")


ONE_OF = {"type": "object", "properties": {"c": {"enum": ["a", "b"]}}, "required": ["c"], "additionalProperties": False}


def test_answers_cut_behind_a_call_say_so(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "w", "parameters": ONE_OF}}
    request: dict[str, Any] = {"model": "chatty", "messages": TURN, "tools": [tool], "tool_choice": "required"}
    # The grammar's end is forbidden, so that the model writes further calls.
    request |= {"temperature": 0, "logit_bias": {"0": -100}, "max_tokens": 60}
    cut = client.chat.completions.create(**request).choices[0]
    assert (cut.finish_reason, len(cut.message.tool_calls or [])) == ("length", 2)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
    assert chunks[-1].finish_reason == "length"
    one = client.chat.completions.create(**request | {"parallel_tool_calls": False}).choices[0]
    assert (one.finish_reason, len(one.message.tool_calls or [])) == ("tool_calls", 1)
    flat = {"type": "function", **tool["function"]}  # type: ignore[dict-item]
    request = {"model": "chatty", "input": TURN, "tools": [flat], "tool_choice": "required", "temperature": 0}
    answer = client.responses.create(**request, max_output_tokens=60, extra_body={"logit_bias": {"0": -100}})
    assert (answer.status, [item.type for item in answer.output]) == ("incomplete", ["function_call"] * 2)


@pytest.mark.parametrize(
    "written",
    [
        '{"a": 1e999}',
        '{"a": 0.1000000000000000055511151231257827}',
        '{"a": 12345678901234567890.5}',
        '{"a": ' + "1" * 5000 + "}",
        '{"a": -0, "b": 1E2}',
        '{"a": "\\ud800"}',
    ],
)
def test_arguments_come_as_they_were_written(written: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    (call,) = parse_calls(HERMES, text)
    assert call["function"] == {"name": "f", "arguments": written}
    json.dumps(call).encode()
    assert parse_calls(HERMES, text.replace(written, "[" * 100_000 + "]" * 100_000)) == []
