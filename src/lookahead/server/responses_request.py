"""Request body of `/v1/responses`, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from lookahead.server.errors import refused
from lookahead.server.fields import FORMAT, MESSAGE, RESPONSES, TOOL, Fields, Many
from lookahead.server.requests import (
    AllowedTools,
    ChatRequest,
    ContentPart,
    Count,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTool,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedTool,
    SomeTools,
    TextFormat,
    TextRequest,
    ToolCall,
)


class Item(Fields):
    """Common fields of input items."""

    id: str | None = Field(default=None, max_length=256)
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(Item, place=MESSAGE):
    """A message."""

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
    """The result of a function."""

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
    """A JSON value that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Fields, place=FORMAT):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )


class Reasoning(Fields):
    """How much to reason."""

    effort: str | None = Field(default=None, max_length=64)
    summary: str | None = Field(default=None, description="ignored: answers have the whole reasoning")
    generate_summary: str | None = None


class FlatTool(Function, place=TOOL):
    """A function."""

    type: Literal["function"]


class Namespace(Fields):
    """Functions with a common prefix in their names."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    tools: list[FlatTool] = Field(max_length=128)


class HostedTool(Fields):
    """A tool that OpenAI's servers run. It is accepted, and not offered to the model."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["web_search", "web_search_preview"]


Tool = Annotated[FlatTool | Namespace | HostedTool, Field(discriminator="type")]


class FlatName(FunctionName):
    """The function that must be called."""

    type: Literal["function"]


class SomeFlatTools(Fields):
    """The functions that may be called, or must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatName] = Field(min_length=1, max_length=128)


RESPONSES_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of chat fields in `/v1/responses`, for errors."""


class ResponsesRequest(TextRequest, place=RESPONSES):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4095, fail_fast=True)] = Field(
        description="a text, or messages, calls, their results, and reasoning"
    )
    instructions: str | None = Field(default=None, description="a system message before all others")
    max_output_tokens: Count | None = Field(default=None, description="default: all that fit into the context")
    text: TextOptions = Field(default_factory=TextOptions, description="`format`, as `response_format` of a chat")
    tools: list[Tool] = Field(
        default_factory=list, max_length=128, description="functions, also in namespaces; see above"
    )
    tool_choice: Literal["none", "auto", "required"] | FlatName | SomeFlatTools | None = Field(
        default=None, description="`none`, `auto`, `required`, a function, or `allowed_tools`"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="whether an answer may have several calls")
    metadata: dict[str, Any] = Field(default_factory=dict, description="returned with the answer")
    truncation: Literal["disabled", "auto"] = Field(
        default="disabled", description="returned with the answer, else ignored: inputs are never cut"
    )
    reasoning: Reasoning = Field(
        default_factory=Reasoning, description="`effort`: an argument of the chat template, if it has one"
    )

    @property
    def functions(self) -> dict[str, tuple[FlatTool, str | None]]:
        """Functions and their namespaces, by the names that the model reads.

        Raises:
            ApiError: Two functions have the same name.
        """
        pairs: list[tuple[FlatTool, str | None]] = []
        for tool in self.tools:
            if isinstance(tool, Namespace):
                pairs += [(inner, tool.name) for inner in tool.tools]
            elif isinstance(tool, FlatTool):
                pairs.append((tool, None))
        functions = {_whole_name(tool.name, namespace): (tool, namespace) for tool, namespace in pairs}
        if len(functions) < len(pairs):
            raise refused("tools", "tools has two functions of the same name; rename one")
        return functions

    @property
    def hosted_tools(self) -> list[str]:
        """Types of the tools that are not offered to the model."""
        return [tool.type for tool in self.tools if isinstance(tool, HostedTool)]

    def as_chat(self) -> ChatRequest:
        """Convert to a chat request."""
        messages = [Message(role="user", content=self.input)] if isinstance(self.input, str) else _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        format_: Any = self.text.format
        if isinstance(format_, SchemaFormat):
            format_ = JsonSchemaFormat(type="json_schema", json_schema=format_)
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_output_tokens,
            response_format=format_,
            tools=[
                FunctionTool(type="function", function=tool.model_copy(update={"name": name}))
                for name, (tool, _) in self.functions.items()
            ],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
            **{name: getattr(self, name) for name in self.model_fields_set.intersection(TextRequest.model_fields)},
        )


def _whole_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _choice(choice: str | FlatName | SomeFlatTools | None) -> Any:
    """Convert `tool_choice` to the format of a chat."""
    if isinstance(choice, FlatName):
        return NamedTool(type="function", function=choice)
    if isinstance(choice, SomeFlatTools):
        tools = [NamedTool(type="function", function=tool) for tool in choice.tools]
        return SomeTools(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _messages(items: Sequence[InputItem]) -> list[Message]:
    """Convert items to messages; reasoning, text and calls of one answer become one message."""
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
    """Return whether an item belongs to the same answer as `message`."""
    return isinstance(item, InputCall) or not (message.content or message.tool_calls)


def _extend(message: Message, item: InputItem) -> None:
    if isinstance(item, InputMessage):
        message.content = item.content
    elif isinstance(item, InputReasoning):
        message.reasoning_content = "".join(part.text for part in item.content or item.summary)
    elif isinstance(item, InputCall):
        function = FunctionCall(name=_whole_name(item.name, item.namespace), arguments=item.arguments)
        message.tool_calls = [*(message.tool_calls or []), ToolCall(id=item.call_id, function=function)]
