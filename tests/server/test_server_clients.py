"""Client libraries for OpenAI's API: a few calls of each, against the texts of `model.generate`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from server_process import ServerProcess

litellm = pytest.importorskip("litellm")
langchain_openai = pytest.importorskip("langchain_openai")

PROMPT = "def add(a, b):"
TURN = [{"role": "user", "content": PROMPT}]
TURN_TEXT = f"# user\n{PROMPT}\n# assistant\n"
PLACE = {
    "title": "place",
    "description": "A place.",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def texts(demo: Any) -> dict[str, str]:
    """Texts of `model.generate` after a prompt and after a chat turn."""
    model, tokenizer = demo

    def after(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        return str(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))

    return {"prompt": after(PROMPT), "turn": after(TURN_TEXT)}


@pytest.fixture
def reached(server: ServerProcess) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "a-key"}


def light(reached: dict[str, Any], **options: Any) -> Any:
    request = {"model": "openai/chatty", "messages": TURN, "max_tokens": 16, "temperature": 0} | options
    return litellm.completion(**reached, **request)


def test_litellm_gets_the_text_whole_and_streamed(reached: dict[str, Any], texts: dict[str, str]) -> None:
    answer = light(reached)
    assert answer.choices[0].message.content == texts["turn"]
    assert answer.usage.completion_tokens == 16
    chunks = list(light(reached, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == texts["turn"]
    assert chunks[-1].usage.completion_tokens == 16
    flat = litellm.text_completion(
        **reached, model="text-completion-openai/chatty", prompt=PROMPT, max_tokens=16, temperature=0
    )
    assert flat.choices[0].text == texts["prompt"]
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        light(reached, max_tokens=100_000)
    with pytest.raises(litellm.AuthenticationError):
        light(reached | {"api_key": "wrong"})


def test_litellm_with_a_schema_and_tools(reached: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    answer = light(reached, response_format=form, max_tokens=60)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "large"}
    tool = {"type": "function", "function": {"name": "go", "parameters": PLACE}}
    request = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "go"}}, "max_tokens": 120}
    (call,) = light(reached, **request).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"name", "large"}


def lang(reached: dict[str, Any], **options: Any) -> Any:
    settings = {"model": "chatty", "temperature": 0, "max_completion_tokens": 16, "max_retries": 0} | options
    return langchain_openai.ChatOpenAI(**reached, **settings)


def test_langchain_gets_the_text_whole_and_streamed(reached: dict[str, Any], texts: dict[str, str]) -> None:
    chat = lang(reached)
    answer = chat.invoke(PROMPT)
    assert answer.content == texts["turn"]
    assert answer.usage_metadata["output_tokens"] == 16
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == texts["turn"]
    assert [each.content for each in chat.batch([PROMPT] * 4)] == [texts["turn"]] * 4
    assert asyncio.run(chat.ainvoke(PROMPT)).content == texts["turn"]
    flat = langchain_openai.OpenAI(**reached, model="chatty", temperature=0, max_tokens=16)
    assert flat.invoke(PROMPT) == texts["prompt"]
    assert "".join(flat.stream(PROMPT)) == texts["prompt"]
    plain = lang(reached, extra_body={"lookahead": {"enabled": False}})
    assert plain.invoke(PROMPT).content == texts["turn"]
    responses = lang(reached, use_responses_api=True, store=False)
    assert responses.invoke(PROMPT).text == texts["turn"]


def test_langchain_with_a_schema_and_tools(reached: dict[str, Any]) -> None:
    chat = lang(reached, max_completion_tokens=120)
    assert set(chat.with_structured_output(PLACE, method="json_schema").invoke(PROMPT)) == {"name", "large"}
    assert set(chat.with_structured_output(PLACE, method="function_calling").invoke(PROMPT)) == {"name", "large"}
    (call,) = chat.bind_tools([PLACE], tool_choice="place").invoke(PROMPT).tool_calls
    assert call["name"] == "place"
    assert set(call["args"]) == {"name", "large"}
