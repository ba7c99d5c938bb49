"""What clients may send. Fields that are neither declared here nor harmless (see `fields`) are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lookahead.config import MAX_NODES_PER_STEP
from lookahead.server.fields import CHAT, COMPLETIONS, OTHER_NAMES, STREAM, Body, Fields, Many
from lookahead.server.messages import FunctionTool, Message, NamedTool, SomeTools, TextPart

MOST_STOPS = 16
MOST_CHOICES = 64
MOST_LOGPROBS = 20


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
    BeforeValidator(
        lambda value: [value][: len(value)] if isinstance(value, str) else value, json_schema_input_type=str | list[str]
    ),
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
        default=None, ge=0, le=2, description="below 0.01 as 0; not given, the model's own, else 1"
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="0: the likeliest token; not given, the model's own, else 1"
    )
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="0 or -1: all tokens")
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

    @model_validator(mode="before")
    @classmethod
    def _with_usual_names(cls, values: Any) -> Any:
        """The same values, where fields have the names that are declared here."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, (field, *part) in OTHER_NAMES.items():
            if field not in cls.model_fields or values.get(name) is None:
                continue
            held = values.get(field) or {}
            if part[0] in held if part and isinstance(held, dict) else held:
                usual = ".".join((field, *part))
                raise ValueError(f"{name} and {usual} are two names of the same thing; give one of them")
            value = values.pop(name)
            values[field] = held | {part[0]: value} if part else value
        return values


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
    best_of: Count | None = Field(default=None, description="no more than `n`: answers are not ranked")
    echo: bool = Field(default=False, description="the prompt before the answer, with its `logprobs`")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else prompt


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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = Field(
        default=None, description="`none`, `auto`, `required`, a function, or `allowed_tools`"
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
