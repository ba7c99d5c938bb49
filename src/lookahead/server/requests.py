"""What clients may send. Fields that are neither declared here nor harmless (see `errors`) are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_json

from lookahead.config import MAX_NODES_PER_STEP
from lookahead.server.errors import CALL, CHAT, COMPLETIONS, MESSAGE, PART, STREAM, TOOL, asks_for_nothing

MOST_STOPS = 16
MOST_CHOICES = 64
MOST_LOGPROBS = 20
_MOST_FIELDS = 256

T = TypeVar("T")

Many = Annotated[list[T], Field(max_length=4096, fail_fast=True)]
"""A list of which the first error is told: there may be thousands."""


class Fields(BaseModel):
    """Base of all that clients send: no further fields but those that are harmless in its `place`, no conversions, and
    `null` is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)
    _place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str = "") -> None:
        cls._place = place

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, values: Any) -> Any:
        if isinstance(values, dict):
            if len(values) > _MOST_FIELDS:  # of which each would be told
                raise ValueError(f"there are {len(values)} fields; the most is {_MOST_FIELDS}")
            return {name: value for name, value in values.items() if not asks_for_nothing(cls._place, name, value)}
        return values


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
    preset: Literal["auto", "paper", "jacobi", "token_recycling", "context_matches", "autoregressive"] | None = None
    step_budget: int | None = Field(default=None, ge=1, le=MAX_NODES_PER_STEP, description="most nodes of a step")
    statistics: bool = Field(default=False, description="tell steps and tokens per step with the usage")
    steps: bool = Field(default=False, description="streaming: tell the token tree of each step with its tokens")


class StreamOptions(Fields, place=STREAM):
    """What a stream tells besides."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="extension of vLLM: tell the usage with each chunk")


class StructuredOutputs(Fields):
    """The form of an answer, as vLLM asks for it: exactly one of these."""

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
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]),
    Field(max_length=MOST_STOPS),
]

Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TextRequest(Body):
    """What all requests for text share."""

    model: str = Field(max_length=512, description="the name of the model, as `/v1/models` has it")
    stream: bool = Field(default=False, description="a chunk for each step: several tokens where drafts were accepted")
    stream_options: StreamOptions = Field(
        default_factory=StreamOptions, description="`include_usage`, and vLLM's `continuous_usage_stats`"
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**63 - 1, description="of the draws; answer *i* of `n` has `seed` + *i*"
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0, or at least 0.01; not given, the model's own, else 1"
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="not given, the model's own, else 1")
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1, description="0: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1, description="as in transformers")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="as in transformers")
    presence_penalty: float = Field(default=0, ge=-2, le=2, description="by the tokens of the answer so far")
    frequency_penalty: float = Field(default=0, ge=-2, le=2, description="by the tokens of the answer so far")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024, description="by token id"
    )
    stop: StopStrings = Field(default_factory=list, description=f"up to {MOST_STOPS} texts that end the answer")
    stop_token_ids: list[Number] = Field(
        default_factory=list, max_length=128, description="end the answer as the end-of-sequence token does"
    )
    ignore_eos: bool = Field(default=False, description="the end-of-sequence token ends nothing")
    min_tokens: int = Field(
        default=0, ge=0, le=2**31 - 1, description="no token that ends the answer is selected before so many"
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="`json`, `json_object`, `regex`, `choice` or `grammar` (Lark or GBNF), as in vLLM"
    )
    user: str | None = Field(default=None, max_length=512, description="written into the log")
    lookahead: LookaheadOptions = Field(
        default_factory=LookaheadOptions, description="how to draft, see below; it changes no text"
    )


class ChoicesRequest(TextRequest):
    """What requests share that may ask for several answers.

    Attributes:
        default_tokens: Most tokens of an answer where no number is named; as many as fit if `None`.
    """

    default_tokens: ClassVar[int | None] = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES, description="answers to each prompt")
    max_tokens: Count | None = Field(default=None, description="16 by default for completions, else as many as fit")


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]

Texts = Annotated[Many[str], Field(min_length=1)]


class CompletionRequest(ChoicesRequest, place=COMPLETIONS):
    """`POST /v1/completions`."""

    default_tokens = 16  # as in OpenAI's API
    prompt: str | Tokens | Texts | Annotated[Many[Tokens], Field(min_length=1)] = Field(
        description="a text, token ids, or a list of either"
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=MOST_LOGPROBS, description="of the model itself, with so many rivals of each token"
    )
    echo: bool = Field(default=False, description="the prompt before the answer; not with `logprobs`")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else prompt


class TextPart(Fields, place=PART):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(Fields, place=PART):
    """Where an image is."""

    url: str


class ImagePart(Fields, place=PART):
    """An image, as chats and `/v1/responses` have it."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """What an earlier answer called."""

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
        """All of its text."""
        return joined(self.content)

    @property
    def images(self) -> list[str]:
        """Addresses of its images."""
        parts = () if isinstance(self.content, str) else self.content
        places = [part.image_url for part in parts if isinstance(part, ImagePart)]
        return [place if isinstance(place, str) else place.url for place in places]


def joined(content: str | Sequence[TextPart | ImagePart]) -> str:
    """The text of a content that may come in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=True, description="arguments always follow the schema")


class FunctionTool(Fields, place=TOOL):
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
    content: str | Many[TextPart]


class ChatRequest(ChoicesRequest, place=CHAT):
    """`POST /v1/chat/completions`."""

    messages: Many[Message] = Field(
        min_length=1, description="by the tokenizer's chat template, else each on a new line"
    )
    max_completion_tokens: Count | None = Field(default=None, description="another name of `max_tokens`")
    logprobs: bool = Field(default=False, description="of the model itself, before penalties, bias and truncation")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_LOGPROBS, description="rivals of each token; needs `logprobs`"
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="`text`, `json_object`, or `json_schema` whether `strict` or not"
    )
    tools: list[FunctionTool] = Field(default_factory=list, max_length=128, description="functions; see below")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="`none`, `auto`, `required`, or a function"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="whether there may be several calls")
    prediction: Prediction | None = Field(
        default=None, description="a text that is expected, which is drafted from; see below"
    )
    reasoning_effort: str | None = Field(
        default=None, max_length=64, description="an argument of the chat template; nothing where it has no such"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="further arguments of the chat template"
    )
    add_generation_prompt: bool = Field(default=True, description="`false`: no turn of the assistant is begun")
    continue_final_message: bool = Field(default=False, description="the answer goes on with the last message")


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
