"""`/v1/responses`: its requests as those of a chat, its answers as items of reasoning, text and calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lookahead.server.answers import ChatForm
from lookahead.server.errors import FORMAT, MESSAGE, RESPONSES, TOOL, ApiError
from lookahead.server.generation import Answer, Generation, Piece
from lookahead.server.requests import (
    ChatRequest,
    ContentPart,
    Count,
    Fields,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTool,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Many,
    Message,
    NamedTool,
    TextFormat,
    TextPart,
    TextRequest,
    ToolCall,
    joined,
)
from lookahead.server.tools import Part


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
    arguments: str


class InputResult(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: str | Many[TextPart]


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


class FlatName(FunctionName):
    """The function that has to be called, as `/v1/responses` has it."""

    type: Literal["function"]


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
    tools: list[FlatTool] = Field(default_factory=list, max_length=128, description="functions; see below")
    tool_choice: Literal["none", "auto", "required"] | FlatName | None = Field(
        default=None, description="`none`, `auto`, `required`, or a function"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="whether there may be several calls")
    reasoning: Reasoning = Field(
        default_factory=Reasoning,
        description="`effort`: an argument of the chat template; nothing where it has no such",
    )

    def as_chat(self) -> ChatRequest:
        """The same request for a chat completion."""
        messages = [Message(role="user", content=self.input)] if isinstance(self.input, str) else _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        asked, choice = self.text.format, self.tool_choice
        form = JsonSchemaFormat(type="json_schema", json_schema=asked) if isinstance(asked, SchemaFormat) else asked
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_output_tokens,
            response_format=form,
            tools=[FunctionTool(type="function", function=tool) for tool in self.tools],
            tool_choice=NamedTool(type="function", function=choice) if isinstance(choice, FlatName) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
            **{name: getattr(self, name) for name in self.model_fields_set.intersection(TextRequest.model_fields)},
        )


def _messages(items: Sequence[InputItem]) -> list[Message]:
    """Items of `/v1/responses` as messages: reasoning, text and calls of one answer are one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputResult):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=joined(item.output)))
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
        function = FunctionCall(name=item.name, arguments=item.arguments)
        message.tool_calls = [*(message.tool_calls or []), ToolCall(id=item.call_id, function=function)]


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_ITEM_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
_PART_FIELDS: dict[str, dict[str, Any]] = {"message": {"annotations": [], "logprobs": []}, "reasoning": {}}
_EVENT_FIELDS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
"""What text of an answer has besides, and reasoning: its item, the part in it, and events about that."""


class ResponsesForm(ChatForm):
    """Of `/v1/responses`. A stream consists of named events, which are numbered."""

    prefix, object, chunk_object, last_event = "resp", "response", "", b""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._reader = self._readers[0]
        self._items: list[dict[str, Any]] = []
        self._numbered = 0

    def whole(self, wholes: Sequence[Piece]) -> dict[str, Any]:
        """See `Form`."""
        self._add(self._reader.add(wholes[0].text))
        self._finish(self.generation.answers[0])
        return self._complete()

    def opening(self) -> list[dict[str, Any]]:
        """See `Form`."""
        begun = self._begun()
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """See `Form`."""
        return self._finish(answer) if piece is None else self._add(self._reader.add(piece.text))

    def closing(self) -> list[dict[str, Any]]:
        """See `Form`."""
        response = self._complete()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """See `Form`."""
        return self._event("error", message=error.detail, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._numbered += 1
        return {"type": kind, "sequence_number": self._numbered - 1, **fields}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """The events of a piece: an item is begun when there is something to put into it."""
        events = []
        for kind, text in (("reasoning", part.reasoning), ("message", part.content)):
            if text:
                if not self._items or self._items[-1]["type"] != kind:
                    events += [*self._close("completed"), *self._open(kind)]
                self._items[-1]["content"][0]["text"] += text
                fields = self._place | {"delta": text} | _EVENT_FIELDS[kind]
                events.append(self._event(f"response.{_PARTS[kind]}.delta", **fields))
        return events

    def _open(self, kind: str) -> list[dict[str, Any]]:
        """Begin an item of text."""
        item: dict[str, Any] = {"type": kind, "id": _identifier(kind), "status": "in_progress", "content": []}
        item |= _ITEM_FIELDS[kind]
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))
        part: dict[str, Any] = {"type": _PARTS[kind], "text": "", **_PART_FIELDS[kind]}
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._place, part=dict(part))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the item of text that is open, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = status
        part: dict[str, Any] = item["content"][0]
        fields = self._place | {"text": part["text"]} | _EVENT_FIELDS[item["type"]]
        return [
            self._event(f"response.{part['type']}.done", **fields),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _finish(self, answer: Answer) -> list[dict[str, Any]]:
        """The events of the end: what was left, and the calls."""
        rest, calls = self._reader.finish()
        events = self._add(rest)
        if not calls and not self._items:
            events += self._open("message")
        events += self._close("incomplete" if answer.handle.finish_reason == "length" else "completed")
        for call in calls:
            events += self._call(call)
        return events

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a call, which comes whole."""
        item = {"type": "function_call", "id": _identifier("function_call"), "call_id": call["id"]}
        item |= call["function"] | {"status": "completed"}
        self._items.append(item)
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"arguments": "", "status": "in_progress"}
        done = {"name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **done),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        """Of the text that is open."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _begun(self) -> dict[str, Any]:
        """The response as it begins."""
        request = self.request
        return {
            "id": self._head["id"],
            "object": self.object,
            "created_at": self._head["created"],
            "status": "in_progress",
            "model": self._head["model"],
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": request.max_tokens,
            "metadata": {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text" if request.response_format is None else request.response_format.type}},
            "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else "auto",
            "tools": [{"type": "function", **tool.function.model_dump()} for tool in request.tools],
            "top_p": request.top_p,
            "usage": None,
        }

    def _complete(self) -> dict[str, Any]:
        cut = self.generation.answers[0].handle.finish_reason == "length"
        counts = self.usage()
        usage = counts.pop("usage")
        return {
            **self._begun(),
            **counts,
            "status": "incomplete" if cut else "completed",
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def _identifier(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
