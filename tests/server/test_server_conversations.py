"""Conversations of several turns with functions, with OpenAI's client, and what models write around text and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from openai import OpenAI

from lookahead.server.app import create_app
from lookahead.server.guard import ServerSettings
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
    """A call, what it returned, and an answer in a form, by chats and by responses, streaming and not."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    asked: dict[str, Any] = {"model": "chatty", "temperature": 0, "tools": [WEATHER, CLOCK]}
    first = client.chat.completions.create(**asked, messages=TURN, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 C"}
    asked |= {
        "messages": [*TURN, message, result],
        "response_format": form,
        "logit_bias": {str(token_of(client, "<")): -100},
    }
    second = client.chat.completions.create(**asked, max_tokens=40)
    assert set(json.loads(second.choices[0].message.content or "")) == {"a"}
    with client.chat.completions.stream(**asked, max_tokens=40) as stream:
        assert stream.get_final_completion().choices[0].message.content == second.choices[0].message.content


def token_of(client: OpenAI, text: str) -> int:
    """The first token of a text."""
    answer = client.post("../tokenize", body={"prompt": text}, cast_to=object)
    return int(answer["tokens"][0])  # type: ignore[index]


def test_responses_carry_function_calls_and_results(client: OpenAI) -> None:
    flat = [{"type": "function", **WEATHER["function"]}, {"type": "function", **CLOCK["function"]}]
    asked: dict[str, Any] = {"model": "chatty", "temperature": 0, "tools": flat}
    begun = asked | {"input": TURN, "tool_choice": {"type": "function", "name": "weather"}}
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
    last = client.responses.create(**asked, input=history, tool_choice="none", max_output_tokens=8)
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
    """A model whose marks are special tokens, as Mistral's are."""
    model, tokenizer = deepcopy(demo[0]), deepcopy(demo[1])
    torch.manual_seed(0)  # of the new tokens
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = TEMPLATE
    served = served_model("x", model, tokenizer)
    with TestClient(create_app([served], ServerSettings()), base_url="http://localhost") as made:
        yield made, tokenizer


def ask(client: TestClient, **fields: Any) -> Any:
    asked = {"model": "x", "messages": TURN, "temperature": 0, "max_tokens": 300} | fields
    answer = client.post("/v1/chat/completions", json=asked)
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
    asked = {"model": "x", "input": TURN, "reasoning": {"effort": "high"}, "max_output_tokens": 8, "temperature": 0}
    answer = client.post("/v1/responses", json=asked | {"logit_bias": {end: -100}}).json()
    (item,) = answer["output"]
    assert item["type"] == "reasoning"
    assert item["content"][0]["text"] == never["reasoning_content"]
    told = client.post("/v1/responses", json=asked | {"logit_bias": {end: 100}, "max_output_tokens": 40}).json()
    assert [item["type"] for item in told["output"]] == ["message"]


CHANNELS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }} in <|channel|>commentary{% endif %}"
    "<|start|>assistant{# then <|channel|>analysis or <|channel|>final #}"
)


def test_answers_in_channels(demo: Any) -> None:
    """As GPT-OSS writes them: between special tokens, of which some end the answer."""
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
        told = [begun.get("reasoning_content"), begun["content"], begun.get("tool_calls")]
        assert any(told)
        assert not any("<|" in text for text in told[:2] if text)
