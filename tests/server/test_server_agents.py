"""Libraries for agents against the server: function calls, their results, and structured answers."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from server_process import ServerProcess

agents = pytest.importorskip("agents")
pydantic_ai = pytest.importorskip("pydantic_ai")

PROMPT = "def add(a, b):"
KEY = "a-key"


class Place(BaseModel):
    """Schema of the answers."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    large: bool


@pytest.fixture
def no_calls(client: OpenAI) -> dict[str, Any]:
    """Forbid `<`, the first token of a call, so that only required calls occur."""
    answer = client.post("../tokenize", body={"prompt": "<"}, cast_to=object)
    return {"logit_bias": {str(answer["tokens"][0]): -100}}  # type: ignore[index]


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_call_functions_and_answer(server: ServerProcess, no_calls: dict[str, Any], kind: str) -> None:
    called: list[str] = []

    @agents.function_tool
    def clock() -> str:
        """The time."""
        called.append("clock")
        return "12:00"

    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("chatty", AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY))
    settings = agents.ModelSettings(
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
        store=True,
        metadata={"a": "b"},
        extra_body=no_calls | {"structured_outputs": {"choice": ["Done."]}},
    )
    agent = agents.Agent("a", instructions="Be brief.", model=model, model_settings=settings, tools=[clock])
    first = agents.Runner.run_sync(agent, PROMPT, max_turns=4)
    assert called == ["clock"]
    assert first.final_output == "Done."
    settings.extra_body = no_calls
    formed = agents.Agent("b", model=model, model_settings=settings, tools=[clock], output_type=Place)
    history = [*first.to_input_list(), {"role": "user", "content": "Again."}]
    assert isinstance(agents.Runner.run_sync(formed, history, max_turns=4).final_output, Place)
    assert called == ["clock", "clock"]


def test_pydantic_ai_calls_functions_and_answers(server: ServerProcess) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("chatty", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=KEY))
    agent = pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 60, "parallel_tool_calls": False})
    first = agent.run_sync(PROMPT, output_type=Place)
    assert isinstance(first.output, Place)
    assert first.usage.output_tokens > 0
    history = first.all_messages()
    second = agent.run_sync("Again.", message_history=history, output_type=pydantic_ai.NativeOutput(Place))
    assert isinstance(second.output, Place)
    assert agent.run_sync("Text.", message_history=second.all_messages()).output


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_gets_an_object_in_each_mode(client: OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    wrapped = instructor.from_openai(client, mode=instructor.Mode[mode])
    limit = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
    turn = [{"role": "user", "content": PROMPT}]
    request = {"model": "chatty", "messages": turn, "response_model": Place, "max_retries": 0, limit: 120}
    assert isinstance(wrapped.create(**request), Place)
    if mode in ("TOOLS", "JSON_SCHEMA"):
        assert list(wrapped.create_partial(**request))[-1].large in (True, False)
