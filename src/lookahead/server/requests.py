"""Request bodies of completions and chats. Undeclared fields are refused, unless `fields` ignores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lookahead.config import MAX_NODES_PER_STEP, Preset
from lookahead.server.fields import (
    CALL,
    CHAT,
    COMPLETIONS,
    MESSAGE,
    OTHER_NAMES,
    PART,
    STREAM,
    TOOL,
    Body,
    Fields,
    Many,
)

MAX_STOPS = 16
MAX_CHOICES = 64
MAX_LOGPROBS = 20


class LookaheadOptions(Fields):
    """Options for drafts. They change the number of steps, never the text."""

    enabled: bool = Field(default=True, description="false: plain decoding, one token a step")
    preset: Preset | None = None
    step_budget: int | None = Field(default=None, ge=1, le=MAX_NODES_PER_STEP, description="most nodes of a step")
    statistics: bool = Field(default=False, description="add steps and tokens per step to the usage")
    steps: bool = Field(default=False, description="streaming: add the token tree of its step to each chunk")


class StreamOptions(Fields, place=STREAM):
    """Optional parts of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="extension of vLLM: the usage in each chunk")


class StructuredOutputs(Fields):
    """Required format of an answer, with vLLM's names. Exactly one field is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema, or its text")
    json_object: Literal[True] | None = None
    regex: str | None = Field(default=None, min_length=1)
    choice: list[str] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = Field(default=None, min_length=1, description="in Lark's form, or GBNF")

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=512)]],
    BeforeValidator(
        lambda value: [value][: len(value)] if isinstance(value, str) else value, json_schema_input_type=str | list[str]
    ),
    Field(max_length=MAX_STOPS),
]

Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TextRequest(Body):
    """Common fields of all requests for text."""

    model: str = Field(max_length=512, description="name of the model in `/v1/models`")
    stream: bool = Field(default=False, description="a chunk for all steps of 20 ms, of more with many clients")
    stream_options: StreamOptions = Field(
        default_factory=StreamOptions, description="`include_usage`, and vLLM's `continuous_usage_stats`"
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**63 - 1, description="of sampling; answer *i* of `n` has `seed` + *i*"
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="below 0.01: greedy; default: the model's own, else 1"
    )
    top_p: float | None = Field(default=None, ge=0, le=1, description="0: greedy; default: the model's own, else 1")
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="0 or -1: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1, description="as in transformers")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="as in transformers")
    presence_penalty: float = Field(default=0, ge=-2, le=2, description="by the tokens of the answer so far")
    frequency_penalty: float = Field(default=0, ge=-2, le=2, description="by the tokens of the answer so far")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024, description="by token id"
    )
    stop: StopStrings = Field(default_factory=list, description=f"up to {MAX_STOPS} texts that end the answer")
    stop_token_ids: list[Number] = Field(
        default_factory=list, max_length=128, description="end the answer as the end-of-sequence token does"
    )
    ignore_eos: bool = Field(default=False, description="continue after the end-of-sequence token")
    min_tokens: int = Field(
        default=0, ge=0, le=2**31 - 1, description="number of tokens before which no token may end the answer"
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="`json`, `json_object`, `regex`, `choice` or `grammar` (Lark or GBNF), as in vLLM"
    )
    user: str | None = Field(default=None, max_length=512, description="written into the log")
    lookahead: LookaheadOptions = Field(
        default_factory=LookaheadOptions, description="options for drafts, see above; they change no text"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_usual_names(cls, values: Any) -> Any:
        """Rename fields that other servers name differently."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, (field, *part) in OTHER_NAMES.items():
            if field not in cls.model_fields or values.get(name) is None:
                continue
            held, value = values.get(field) or {}, values.pop(name)
            new = {part[0]: value} if part else value
            if part and isinstance(held, dict) and held.get(part[0], value) == value:
                new = held | new
            elif held and held != new:
                usual = ".".join((field, *part))
                raise ValueError(f"{name} and {usual} are two names of the same thing; give one of them")
            values[field] = new
        return values


class ChoicesRequest(TextRequest):
    """Common fields of requests for several answers.

    Attributes:
        default_tokens: Default of `max_tokens`; the rest of the context if `None`.
    """

    default_tokens: ClassVar[int | None] = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="answers to each prompt")
    max_tokens: Count | None = Field(
        default=None, description="default: 16 for completions, else the rest of the context"
    )


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]

Texts = Annotated[Many[str], Field(min_length=1)]


class CompletionRequest(ChoicesRequest, place=COMPLETIONS):
    """`POST /v1/completions`."""

    default_tokens = 16  # as in OpenAI's API
    prompt: str | Tokens | Texts | Annotated[Many[Tokens], Field(min_length=1)] = Field(
        description="a text, token ids, or a list of either"
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="number of alternatives to each token, without penalties"
    )
    best_of: Count | None = Field(default=None, description="at most `n`: answers are not ranked")
    echo: bool = Field(default=False, description="the prompt before the answer, with its `logprobs`")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts, each a text or token ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else prompt


class TextPart(Fields, place=PART):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(Fields, place=PART):
    """The address of an image."""

    url: str


class ImagePart(Fields, place=PART):
    """An image."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str


class RefusalPart(Fields, place=PART):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


ContentPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """Name and arguments of a call in an earlier answer."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Fields, place=CALL):
    """A call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields, place=MESSAGE):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] = ""
    reasoning_content: str | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @property
    def text(self) -> str:
        """Text of all parts."""
        return joined(self.content)

    @property
    def images(self) -> list[str]:
        """Addresses of the images."""
        parts = () if isinstance(self.content, str) else self.content
        addresses = [part.image_url for part in parts if isinstance(part, ImagePart)]
        return [address if isinstance(address, str) else address.url for address in addresses]


def joined(content: str | Sequence[TextPart | RefusalPart | ImagePart]) -> str:
    """Join the text of all parts of a content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if not isinstance(part, ImagePart))


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=True, description="arguments always follow the schema")


class FunctionTool(Fields, place=TOOL):
    """A tool; functions are the only type."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """A function, by name."""

    name: str = Field(max_length=128)


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class SomeTools(Fields):
    """The tools that may be called, or must be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(Fields):
    """The schema of an answer."""

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
    """Predicted output, for example the file to be edited."""

    type: Literal["content"]
    content: str | Many[TextPart]


class ChatRequest(ChoicesRequest, place=CHAT):
    """`POST /v1/chat/completions`."""

    messages: Many[Message] = Field(
        min_length=1, description="by the tokenizer's chat template, else each on a new line"
    )
    max_completion_tokens: Count | None = Field(default=None, description="another name of `max_tokens`")
    logprobs: bool = Field(default=False, description="log-probabilities before penalties, bias and truncation")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="number of alternatives to each token; needs `logprobs`"
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="`text`, `json_object`, or `json_schema` whether `strict` or not"
    )
    tools: list[FunctionTool] = Field(default_factory=list, max_length=128, description="functions; see above")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = Field(
        default=None, description="`none`, `auto`, `required`, a function, or `allowed_tools`"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="whether an answer may have several calls")
    prediction: Prediction | None = Field(default=None, description="predicted output, used for drafts; see above")
    reasoning_effort: str | None = Field(
        default=None, max_length=64, description="an argument of the chat template, if it has one"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="further arguments of the chat template"
    )
    add_generation_prompt: bool = Field(default=True, description="begin a turn of the assistant")
    continue_final_message: bool = Field(default=False, description="continue the last message")


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a conversation as the chat template writes it."""

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """`POST /detokenize`: token ids."""

    model: str | None = Field(default=None, max_length=512)
    tokens: list[Number] = Field(max_length=2**20, fail_fast=True)
