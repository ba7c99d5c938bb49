"""Fields of requests: the base of all that clients send, and the fields that this server has no use for: those that ask
for nothing, those that have another name here, and those that would change the answer and are refused.

What is used is declared in `requests` and `responses`. Together they are the table of fields in `docs/server.md`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_json

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
MESSAGE, PART, CALL, TOOL = "message", "part", "call", "tool"
FORMAT, STREAM = "format", "stream options"

ANY = object()
"""Whatever the value is, it asks for nothing."""


@dataclass(frozen=True)
class Unused:
    """A field that is not used.

    Attributes:
        name: Its name.
        places: Bodies, or parts of them, that may have it.
        harmless: Values that ask for nothing, or `ANY`. All others are refused.
        reason: Why there is nothing to be done, or why it is refused.
    """

    name: str
    places: tuple[str, ...]
    harmless: Any
    reason: str


_ALL = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

UNUSED = (
    Unused("store", (CHAT, RESPONSES), ANY, "nothing is stored"),
    Unused("metadata", (CHAT, MESSAGES), ANY, "a note of the client"),
    Unused("client_metadata", (RESPONSES,), ANY, "a note of the client"),
    Unused("service_tier", (CHAT, RESPONSES, MESSAGES), ANY, "there is one tier"),
    Unused("prompt_cache_key", (CHAT, RESPONSES), ANY, "prompts that begin alike share their beginning anyway"),
    Unused("prompt_cache_retention", (CHAT, RESPONSES), ANY, "the cache is bounded by memory, not by time"),
    Unused("safety_identifier", (CHAT, RESPONSES), ANY, "a note of the client"),
    Unused("verbosity", (CHAT, FORMAT), ANY, "a hint that no model here was trained on"),
    Unused("include", (RESPONSES,), ANY, "names outputs of hosted tools, of which there are none"),
    Unused("max_tool_calls", (RESPONSES,), ANY, "bounds hosted tools, of which there are none"),
    Unused("background", (RESPONSES,), (False,), "answers are given at once, and not stored"),
    Unused("previous_response_id", (RESPONSES,), (), "answers are not stored; send the conversation in input"),
    Unused("conversation", (RESPONSES,), (), "conversations are not stored; send them in input"),
    Unused("prompt", (RESPONSES,), (), "prompt templates are not stored here"),
    Unused("modalities", (CHAT,), (["text"],), "answers are text"),
    Unused("audio", (CHAT,), (), "answers are text"),
    Unused("web_search_options", (CHAT,), (), "this server searches nothing"),
    Unused("functions", (CHAT,), ([],), "use tools"),
    Unused("function_call", (CHAT,), ("none",), "use tool_choice"),
    Unused("suffix", (COMPLETIONS,), ("",), "models here continue texts, and fill no gaps"),
    Unused("request_id", _ALL, ANY, "the header X-Request-Id of the answer names it"),
    Unused("cache_salt", _ALL, ANY, "which texts share keys and values changes no answer"),
    Unused("priority", _ALL, (0,), "requests are served in their order"),
    Unused("skip_special_tokens", _ALL, (True,), "special tokens are no part of texts"),
    Unused("spaces_between_special_tokens", _ALL, ANY, "special tokens are no part of texts"),
    Unused("include_stop_str_in_output", _ALL, (False,), "texts end before a stop string"),
    Unused("return_token_ids", _ALL, (False,), "answers are text; /tokenize has token ids"),
    Unused("return_tokens_as_token_ids", _ALL, (False,), "answers are text; /tokenize has token ids"),
    Unused("length_penalty", _ALL, (1,), "there is no beam search"),
    Unused("use_beam_search", _ALL, (False,), "there is no beam search"),
    Unused("prompt_logprobs", _ALL, (), "log-probabilities are those of answers"),
    Unused("truncate_prompt_tokens", _ALL, (), "prompts are never cut; too long ones are refused"),
    Unused("allowed_token_ids", _ALL, (), "use structured_outputs or logit_bias"),
    Unused("bad_words", _ALL, ([],), "use logit_bias"),
    Unused("guided_decoding_backend", _ALL, ANY, "there is one"),
    Unused("cache_prompt", _ALL, ANY, "prompts that begin alike share their beginning anyway"),
    Unused("top_logprobs", (RESPONSES,), (0,), "log-probabilities are told of chats and completions"),
    Unused("chat_template", (CHAT,), (), "the template is the tokenizer's own"),
    Unused("documents", (CHAT,), ([],), "use chat_template_kwargs.documents"),
    Unused("include_reasoning", (CHAT,), (True,), "reasoning is told where the model writes it"),
    Unused("separate_reasoning", (CHAT,), (True,), "reasoning is told apart from the answer"),
    Unused("refusal", (MESSAGE,), ANY, "of an earlier answer"),
    Unused("annotations", (MESSAGE, PART), ANY, "of an earlier answer"),
    Unused("detail", (PART,), ANY, "the model's processor says how closely it looks"),
    Unused("logprobs", (PART,), ANY, "of an earlier answer"),
    Unused("provider_specific_fields", (MESSAGE, CALL), ANY, "of an earlier answer"),
    Unused("index", (CALL,), ANY, "of an earlier answer"),
    Unused("context_management", (MESSAGES,), ANY, "conversations are taken as they are sent"),
    Unused("container", (MESSAGES,), (), "this server runs no code"),
    Unused("mcp_servers", (MESSAGES,), ([],), "this server calls no other servers"),
    Unused("citations", (PART,), ANY, "of an earlier answer"),
    Unused("caller", (PART,), ANY, "of an earlier answer"),
    Unused("eager_input_streaming", (TOOL,), ANY, "calls come whole"),
    Unused(
        "cache_control", (MESSAGE, PART, TOOL, MESSAGES), ANY, "prompts that begin alike share their beginning anyway"
    ),
    Unused("include_obfuscation", (STREAM,), ANY, "chunks are not padded"),
)

OTHER_NAMES = {
    "guided_json": ("structured_outputs", "json"),
    "guided_regex": ("structured_outputs", "regex"),
    "guided_choice": ("structured_outputs", "choice"),
    "guided_grammar": ("structured_outputs", "grammar"),
    "json_schema": ("structured_outputs", "json"),
    "regex": ("structured_outputs", "regex"),
    "ebnf": ("structured_outputs", "grammar"),
    "repeat_penalty": ("repetition_penalty",),
    "enable_thinking": ("chat_template_kwargs", "enable_thinking"),
}
"""Fields of vLLM, sglang, llama.cpp and others, and what they are called here."""

REASONS = {unused.name: unused.reason for unused in UNUSED}
_HARMLESS = {(unused.name, place): unused.harmless for unused in UNUSED for place in unused.places}


def asks_for_nothing(place: str, name: str, value: Any) -> bool:
    """Whether a field that is not used may be left out without a change of the answer."""
    if value is None:
        return True
    harmless = _HARMLESS.get((name, place), ())
    return harmless is ANY or any(value == one and type(value) is type(one) for one in harmless)


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


def text_fault(error: Exception) -> str:
    """What is wrong with JSON that cannot be read, or not be written again."""
    said = str(error)
    if isinstance(error, RecursionError) or "depth" in said or "Circular" in said:
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    if isinstance(error, UnicodeEncodeError) or "surrogate" in said:  # which no tokenizer takes, and no answer repeats
        return "a text holds half of a surrogate pair, which is no character"
    if "integer string conversion" in said:
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return said


class Body(Fields):
    """Base of whole requests: all of their text is text."""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, values: Any) -> Any:
        try:
            to_json(values, fallback=lambda value: None)
        except ValueError as error:
            raise ValueError(text_fault(error)) from None
        return values
