"""Requests to `/v1/responses`, as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from lookahead.server.errors import refused
from lookahead.server.fields import FORMAT, MESSAGE, RESPONSES, TOOL, Fields, Many
from lookahead.server.messages import (
    AllowedTools,
    ContentPart,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTool,
    Message,
    NamedTool,
    SomeTools,
    ToolCall,
)
from lookahead.server.requests import (
    ChatRequest,
    Count,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    TextFormat,
    TextRequest,
)


class Item(Fields):
    """Something in the input, which may be of an earlier answer."""

    id: str | None = Field(default=None, max_length=256)
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(Item, place=MESSAGE):
    """A message of the input of `/v1/responses`, which may be one of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[ContentPart]
    phase: str | None = Field(default=None, max_length=64)


class InputCall(Item):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    namespace: str | None = Field(default=None, max_length=256)
    arguments: str


class InputResult(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: str | Many[ContentPart]


class ReasoningPart(Fields):
    """A piece of the reasoning of an earlier answer."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Many[ReasoningPart] = Field(default_factory=list)
    content: Many[ReasoningPart] = Field(default_factory=list)
    encrypted_content: str | None = None


InputItem = InputMessage | InputCall | InputResult | InputReasoning


class SchemaFormat(JsonSchema):
    """A JSON value that follows a schema, as `/v1/responses` asks for it."""

    type: Literal["json_schema"]


class TextOptions(Fields, place=FORMAT):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )


class Reasoning(Fields):
    """How much to reason."""

    effort: str | None = Field(default=None, max_length=64)
    summary: str | None = Field(default=None, description="reasoning is told whole")
    generate_summary: str | None = None


class FlatTool(Function, place=TOOL):
    """A function, as `/v1/responses` has it."""

    type: Literal["function"]


class Namespace(Fields):
    """Functions that share the beginning of their names."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    tools: list[FlatTool] = Field(max_length=128)


class HostedTool(Fields):
    """A tool that OpenAI's servers run themselves. This one has none, and leaves it out."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["web_search", "web_search_preview"]


Tool = Annotated[FlatTool | Namespace | HostedTool, Field(discriminator="type")]


class FlatName(FunctionName):
    """The function that has to be called, as `/v1/responses` has it."""

    type: Literal["function"]


class SomeFlatTools(Fields):
    """The functions that may be called, or have to be, as `/v1/responses` has them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatName] = Field(min_length=1, max_length=128)


RESPONSES_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What fields of a chat are called in a request to `/v1/responses`."""


class ResponsesRequest(TextRequest, place=RESPONSES):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4095, fail_fast=True)] = Field(
        description="a text, or messages, calls, what these returned, and reasoning"
    )
    instructions: str | None = Field(default=None, description="a system message before all others")
    max_output_tokens: Count | None = Field(default=None, description="as many as fit if not given")
    text: TextOptions = Field(default_factory=TextOptions, description="`format`, as `response_format` of a chat")
    tools: list[Tool] = Field(
        default_factory=list, max_length=128, description="functions, also in namespaces; see below"
    )
    tool_choice: Literal["none", "auto", "required"] | FlatName | SomeFlatTools | None = Field(
        default=None, description="`none`, `auto`, `required`, a function, or `allowed_tools`"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="whether there may be several calls")
    metadata: dict[str, Any] = Field(default_factory=dict, description="told with the answer")
    truncation: Literal["disabled", "auto"] = Field(
        default="disabled", description="told with the answer: inputs are never cut; too long ones are refused"
    )
    reasoning: Reasoning = Field(
        default_factory=Reasoning,
        description="`effort`: an argument of the chat template; nothing where it has no such",
    )

    @property
    def functions(self) -> dict[str, tuple[FlatTool, str | None]]:
        """All functions and their namespaces, by the names that the model knows.

        Raises:
            ApiError: Two have one name.
        """
        placed: list[tuple[FlatTool, str | None]] = []
        for tool in self.tools:
            if isinstance(tool, Namespace):
                placed += [(inner, tool.name) for inner in tool.tools]
            elif isinstance(tool, FlatTool):
                placed.append((tool, None))
        found = {_whole_name(tool.name, namespace): (tool, namespace) for tool, namespace in placed}
        if len(found) < len(placed):
            raise refused("tools", "tools has two functions of one name")
        return found

    @property
    def left_out(self) -> list[str]:
        """Types of tools that are not offered to the model."""
        return [tool.type for tool in self.tools if isinstance(tool, HostedTool)]

    def as_chat(self) -> ChatRequest:
        """The same request for a chat completion."""
        messages = [Message(role="user", content=self.input)] if isinstance(self.input, str) else _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        asked = self.text.format
        form = JsonSchemaFormat(type="json_schema", json_schema=asked) if isinstance(asked, SchemaFormat) else asked
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_output_tokens,
            response_format=form,
            tools=[_tool(name, tool) for name, (tool, _) in self.functions.items()],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
            **{name: getattr(self, name) for name in self.model_fields_set.intersection(TextRequest.model_fields)},
        )


def _whole_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _tool(name: str, tool: FlatTool) -> FunctionTool:
    function = tool.model_copy(update={"name": name})
    return FunctionTool(type="function", function=function)


def _choice(choice: str | FlatName | SomeFlatTools | None) -> Any:
    """Which tools are to be called, as a chat has it."""
    if isinstance(choice, FlatName):
        return NamedTool(type="function", function=choice)
    if isinstance(choice, SomeFlatTools):
        named = [NamedTool(type="function", function=tool) for tool in choice.tools]
        return SomeTools(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=named))
    return choice


def _messages(items: Sequence[InputItem]) -> list[Message]:
    """Items of `/v1/responses` as messages: reasoning, text and calls of one answer are one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputResult):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.content))
        else:
            if not messages or messages[-1].role != "assistant" or not _may_follow(messages[-1], item):
                messages.append(Message(role="assistant"))
            _extend(messages[-1], item)
    return messages


def _may_follow(message: Message, item: InputItem) -> bool:
    """Whether an item is a part of the same answer as what the message holds."""
    return isinstance(item, InputCall) or not (message.content or message.tool_calls)


def _extend(message: Message, item: InputItem) -> None:
    if isinstance(item, InputMessage):
        message.content = item.content
    elif isinstance(item, InputReasoning):
        message.reasoning_content = "".join(part.text for part in item.content or item.summary)
    elif isinstance(item, InputCall):
        function = FunctionCall(name=_whole_name(item.name, item.namespace), arguments=item.arguments)
        message.tool_calls = [*(message.tool_calls or []), ToolCall(id=item.call_id, function=function)]
