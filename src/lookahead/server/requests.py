"""What clients may send. Fields that are not declared here are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_json

from lookahead.config import MAX_NODES_PER_STEP

MOST_STOPS = 16
MOST_CHOICES = 64
MOST_LOGPROBS = 20


class Fields(BaseModel):
    """Base of all that clients send: no further fields, no conversions, and `null` is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values


Preset = Literal["auto", "paper", "jacobi", "token_recycling", "context_matches", "autoregressive"]


class Body(Fields):
    """Base of whole requests: all of their text is text."""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, values: Any) -> Any:
        try:
            to_json(values, fallback=lambda value: None)
        except ValueError:  # half a surrogate pair, which no tokenizer takes and no answer can repeat
            raise ValueError("a text holds half of a surrogate pair, which is no character") from None
        return values


class LookaheadOptions(Fields):
    """How to draft for this request; it changes the number of steps, never the text."""

    enabled: bool = Field(default=True, description="false: plain decoding, one token a step")
    preset: Preset | None = None
    step_budget: int | None = Field(default=None, ge=1, le=MAX_NODES_PER_STEP, description="most nodes of a step")
    statistics: bool = Field(default=False, description="tell steps and tokens per step with the usage")
    steps: bool = Field(default=False, description="streaming: tell the token tree of each step with its tokens")


class StreamOptions(Fields):
    """What a stream tells besides."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="extension of vLLM: tell the usage with each chunk")


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=512)]],
    BeforeValidator(_one_or_more, json_schema_input_type=str | list[str]),
    Field(max_length=MOST_STOPS),
]


class TextRequest(Body):
    """What all requests for text share."""

    model: str = Field(max_length=512)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: StopStrings = Field(default_factory=list)
    temperature: float | None = Field(default=None, ge=0, le=2, description="0, or at least 0.01")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1, description="0: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    user: str | None = Field(default=None, max_length=512, description="written into the log")
    lookahead: LookaheadOptions = Field(default_factory=LookaheadOptions)

    @property
    def length_fields(self) -> dict[str, int | None]:
        """Fields that bound the length of the answer, by name."""
        return {"max_tokens": self.max_tokens}


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

Texts = Annotated[list[str], Field(min_length=1)]


class CompletionRequest(TextRequest):
    """`POST /v1/completions`."""

    prompt: str | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else prompt


class TextPart(Fields):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Fields):
    """What an earlier answer called."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Fields):
    """A call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @property
    def text(self) -> str:
        """All of its text."""
        return joined(self.content)


def joined(content: str | Sequence[TextPart]) -> str:
    """The text of a content that may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=True, description="arguments always follow the schema")

    @property
    def schema_or_any(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.parameters or {"type": "object"}


class FunctionTool(Fields):
    """A tool of the one type that there is."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """A function, by name."""

    name: str = Field(max_length=64)


class NamedTool(Fields):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Fields):
    """The schema of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = Field(default=True, description="answers always follow the schema")


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    """A JSON value that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Prediction(Fields):
    """A text that is expected, such as a file of which a part is to be edited."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatRequest(TextRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    @property
    def length_fields(self) -> dict[str, int | None]:
        """See `TextRequest`."""
        return {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}


class InputPart(TextPart):
    """A piece of a message of the input of `/v1/responses`, which may be one of an earlier answer."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Fields):
    """A message of the input of `/v1/responses`, which may be an output item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = Field(default=None, max_length=256)
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class SchemaFormat(Fields):
    """A JSON value that follows a schema, as `/v1/responses` asks for it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    type: Literal["json_schema"]
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class TextOptions(Fields):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )


RESPONSES_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What fields of a chat are called in a request to `/v1/responses`."""


class ResponsesRequest(Body):
    """`POST /v1/responses`, for text."""

    model: str = Field(max_length=512)
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=4095)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    text: TextOptions = Field(default_factory=TextOptions)
    stream: bool = False
    store: Literal[False] = Field(default=False, description="answers are never stored")
    user: str | None = Field(default=None, max_length=512)
    lookahead: LookaheadOptions = Field(default_factory=LookaheadOptions)

    def as_chat(self) -> ChatRequest:
        """The same request for a chat completion."""
        messages = (
            [Message(role="user", content=self.input)]
            if isinstance(self.input, str)
            else [Message(role=message.role, content=joined(message.content)) for message in self.input]
        )
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        asked = self.text.format
        if isinstance(asked, SchemaFormat):
            schema = JsonSchema(name=asked.name, schema=asked.schema_)
            format_: ResponseFormat = JsonSchemaFormat(type="json_schema", json_schema=schema)
        else:
            format_ = asked
        same = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "seed", "stream", "user")}
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_output_tokens,
            response_format=format_,
            lookahead=self.lookahead,
            **same,
        )


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a conversation as the chat template writes it."""

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
