"""`/v1/messages`, Anthropic's protocol: requests as chat requests, answers as blocks and events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lookahead.server.answers import ChatForm
from lookahead.server.errors import ApiError
from lookahead.server.fields import MESSAGE, MESSAGES, PART, TOOL, Fields, Many
from lookahead.server.generation import Answer, Generation
from lookahead.server.outbox import Piece
from lookahead.server.requests import (
    ChatRequest,
    ContentPart,
    Count,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTool,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedTool,
    StopStrings,
    TextPart,
    TextRequest,
    ToolCall,
    joined,
)
from lookahead.server.tools import Part


class TextBlock(Fields, place=PART):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageBlock(Fields, place=PART):
    """An image."""

    type: Literal["image"]
    source: dict[str, str]


class ThinkingBlock(Fields, place=PART):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class CallBlock(Fields, place=PART):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: dict[str, Any]


class ResultBlock(Fields, place=PART):
    """The result of a function."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | Many[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool = False


Block = Annotated[TextBlock | ImageBlock | ThinkingBlock | CallBlock | ResultBlock, Field(discriminator="type")]


class Turn(Fields, place=MESSAGE):
    """A message of either side."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class InputTool(Fields, place=TOOL):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = True


class ToolChoice(Fields):
    """Permission or duty to call functions."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = Field(default="", max_length=128)
    disable_parallel_tool_use: bool = False


class OutputFormat(Fields):
    """A JSON value that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Format of the answer, and reasoning effort."""

    effort: str | None = Field(default=None, max_length=64)
    format: OutputFormat | None = None


class MessagesRequest(TextRequest, place=MESSAGES):
    """`POST /v1/messages`."""

    messages: Annotated[Many[Turn], Field(min_length=1)] = Field(
        description="texts, images, reasoning, calls and their results"
    )
    max_tokens: Count = Field(description="most tokens of the answer")
    system: str | Many[TextBlock] = Field(default="", description="a system message before all others")
    stop_sequences: StopStrings = Field(default_factory=list, description="another name of `stop`")
    tools: list[InputTool] = Field(default_factory=list, max_length=128, description="functions; see above")
    tool_choice: ToolChoice | None = Field(default=None, description="`auto`, `any`, `none`, or a function")
    thinking: dict[str, Any] = Field(
        default_factory=dict, description="`type`: `enable_thinking` of the chat template, if it has one"
    )
    output_config: OutputConfig = Field(
        default_factory=OutputConfig, description="`format` and `effort`: as `response_format` and `reasoning_effort`"
    )

    def as_chat(self) -> ChatRequest:
        """Convert to a chat request."""
        system = self.system if isinstance(self.system, str) else "".join(block.text for block in self.system)
        messages = [Message(role="system", content=system)] if system else []
        for turn in self.messages:
            messages += _messages(turn)
        continues = messages[-1].role == "assistant"
        choice, form = self.tool_choice or ToolChoice(type="auto"), self.output_config.format
        tool_choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        choices: dict[str, Any] = {"any": "required", "tool": tool_choice}
        tools = [
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema) for tool in self.tools
        ]
        shared = self.model_fields_set.intersection(TextRequest.model_fields)
        fields = {name: getattr(self, name) for name in shared} | {"stop": [*self.stop, *self.stop_sequences]}
        schema = None if form is None else JsonSchema(name="answer", schema=form.schema_)
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_tokens,
            tools=[FunctionTool(type="function", function=tool) for tool in tools],
            tool_choice=choices.get(choice.type, choice.type),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_format=None if schema is None else JsonSchemaFormat(type="json_schema", json_schema=schema),
            reasoning_effort=self.output_config.effort,
            chat_template_kwargs={"enable_thinking": self.thinking.get("type") != "disabled"} if self.thinking else {},
            continue_final_message=continues,
            add_generation_prompt=not continues,
            **fields,
        )


class CountRequest(MessagesRequest, place=MESSAGES):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: Count = 1


def _messages(turn: Turn) -> list[Message]:
    """Convert a turn to chat messages; each result of a function is a message."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    messages, contents, thoughts, calls = [], [], [], []
    for block in turn.content:
        if isinstance(block, ResultBlock):
            messages.append(Message(role="tool", tool_call_id=block.tool_use_id, content=_parts(block.content)))
        elif isinstance(block, CallBlock):
            function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, function=function))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        else:
            contents.append(block)
    if contents or calls or thoughts or not messages:
        content = _parts(contents) if turn.role == "user" else joined(_parts(contents))
        thought = "".join(thoughts) or None
        messages.append(Message(role=turn.role, content=content, reasoning_content=thought, tool_calls=calls or None))
    return messages


def _parts(blocks: Any) -> list[ContentPart]:
    parts: list[ContentPart] = []
    for block in [TextBlock(type="text", text=blocks)] if isinstance(blocks, str) else blocks:
        if isinstance(block, TextBlock):
            parts.append(TextPart(type="text", text=block.text))
        else:
            source = block.source
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append(ImagePart(type="image_url", image_url=ImageUrl(url=url)))
    return parts


def _value(arguments: str) -> Any:
    """Parse the arguments of a call; wrap their text if JSON cannot represent the values."""
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value


_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesForm(ChatForm):
    """Response format of `/v1/messages`. A stream consists of named events."""

    prefix, last_event = "msg", b""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._blocks: list[dict[str, Any]] = []
        self._reason: str | None = None

    def whole(self, wholes: Sequence[Piece]) -> dict[str, Any]:
        """Return the message of a response without streaming."""
        answer = self.generation.answers[0]
        self._add(self._readers[0].add(wholes[0].text))
        self._finish(answer)
        return self._message(self._blocks) | self._ending() | {"usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Return the event that begins the message."""
        return [{"type": "message_start", "message": self._message([]) | {"usage": self._usage()}}]

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """Return the events of a piece, or of the end of the answer."""
        return self._finish(answer) if piece is None else self._add(self._readers[0].add(piece.text))

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that end the message."""
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error."""
        return {"type": "error"} | error.body()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        names = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return names | {"content": content, "stop_reason": None, "stop_sequence": None}

    def _ending(self) -> dict[str, Any]:
        stop = self.generation.answers[0].builder.stop
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(self._reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self.usage()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece. The first text of a kind begins a block."""
        events = []
        for kind, field, text in (("thinking", "thinking", part.reasoning), ("text", "text", part.content)):
            if text:
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    more = {"signature": ""} if kind == "thinking" else {}
                    events += [*self._close(), self._open({"type": kind, field: "", **more})]
                self._blocks[-1][field] += text
                events.append(self._event("content_block_delta", delta={"type": f"{kind}_delta", field: text}))
        return events

    def _finish(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the last events of an answer: remaining text, then each call."""
        rest, calls = self._readers[0].finish()
        self._reason = self._finish_reason(answer, calls)
        events = [*self._add(rest), *self._close()]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            events.append(self._open({"type": "tool_use", "id": call["id"], "name": name, "input": {}}))
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events += [self._event("content_block_delta", delta=delta), *self._close()]
            self._blocks[-1]["input"] = _value(arguments)
        return events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        return self._event("content_block_start", content_block=dict(block))

    def _close(self) -> list[dict[str, Any]]:
        return [self._event("content_block_stop")] if self._blocks else []
