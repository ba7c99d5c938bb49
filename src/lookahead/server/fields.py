"""Base classes of request bodies, and the fields that this server renames, ignores or refuses.

`requests` and `responses_request` declare the supported fields. `docs/server.md` has a table of all of them.
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
"""Marker: any value of the field is ignored."""


@dataclass(frozen=True)
class Unused:
    """Field without effect.

    Attributes:
        name: Name of the field.
        places: Bodies, or parts of bodies, with this field.
        harmless: Values that are ignored, or `ANY`. Other values are refused.
        reason: Reason for ignoring or refusing it.
    """

    name: str
    places: tuple[str, ...]
    harmless: Any
    reason: str


_ALL = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

UNUSED = (
    Unused("store", (CHAT, RESPONSES), ANY, "nothing is stored"),
    Unused("metadata", (CHAT, COMPLETIONS, MESSAGES), ANY, "a note of the client"),
    Unused("client_metadata", _ALL, ANY, "a note of the client"),
    Unused("service_tier", (CHAT, RESPONSES, MESSAGES), ANY, "there is one tier"),
    Unused("prompt_cache_key", (CHAT, RESPONSES), ANY, "common prefixes of prompts are always shared"),
    Unused("prompt_cache_retention", (CHAT, RESPONSES), ANY, "the cache is bounded by memory, not by time"),
    Unused("safety_identifier", (CHAT, RESPONSES), ANY, "a note of the client"),
    Unused("verbosity", (CHAT, FORMAT), ANY, "chat templates have no place for it"),
    Unused("include", (RESPONSES,), ANY, "there are no hosted tools"),
    Unused("max_tool_calls", (RESPONSES,), ANY, "there are no hosted tools"),
    Unused("background", (RESPONSES,), (False,), "answers are not stored"),
    Unused("previous_response_id", (RESPONSES,), (), "answers are not stored; send the conversation in input"),
    Unused("conversation", (RESPONSES,), (), "conversations are not stored; send them in input"),
    Unused("prompt", (RESPONSES,), (), "prompt templates are not stored here"),
    Unused("modalities", (CHAT,), (["text"],), "answers are text"),
    Unused("audio", (CHAT,), (), "answers are text"),
    Unused("web_search_options", (CHAT,), (), "this server searches nothing"),
    Unused("functions", (CHAT,), ([],), "use tools"),
    Unused("function_call", (CHAT,), ("none",), "use tool_choice"),
    Unused("suffix", (COMPLETIONS,), ("",), "models here only continue texts"),
    Unused("request_id", _ALL, ANY, "the server assigns it, in the header X-Request-Id of the answer"),
    Unused("cache_salt", _ALL, ANY, "shared keys and values change no answer"),
    Unused("priority", _ALL, (0,), "requests are served in their order"),
    Unused("skip_special_tokens", _ALL, (True,), "answers never contain special tokens"),
    Unused("spaces_between_special_tokens", _ALL, ANY, "answers never contain special tokens"),
    Unused("include_stop_str_in_output", _ALL, (False,), "texts end before a stop string"),
    Unused("return_token_ids", _ALL, (False,), "answers are text; /tokenize returns token ids"),
    Unused("return_tokens_as_token_ids", _ALL, (False,), "answers are text; /tokenize returns token ids"),
    Unused("length_penalty", _ALL, (1,), "there is no beam search"),
    Unused("use_beam_search", _ALL, (False,), "there is no beam search"),
    Unused("prompt_logprobs", _ALL, (), "use echo with logprobs, in /v1/completions"),
    Unused("truncate_prompt_tokens", _ALL, (), "prompts are never cut; shorten the prompt"),
    Unused("allowed_token_ids", _ALL, (), "use structured_outputs or logit_bias"),
    Unused("bad_words", _ALL, ([],), "use logit_bias"),
    Unused("guided_decoding_backend", _ALL, ANY, "there is only one"),
    Unused("cache_prompt", _ALL, ANY, "common prefixes of prompts are always shared"),
    Unused("top_logprobs", (RESPONSES,), (0,), "use /v1/chat/completions for log-probabilities"),
    Unused("chat_template", (CHAT,), (), "the tokenizer's own template is used"),
    Unused("documents", (CHAT,), ([],), "use chat_template_kwargs.documents"),
    Unused("include_reasoning", (CHAT,), (True,), "answers include their reasoning"),
    Unused("separate_reasoning", (CHAT,), (True,), "reasoning is separate from the answer"),
    Unused("refusal", (MESSAGE,), ANY, "of an earlier answer"),
    Unused("annotations", (MESSAGE, PART), ANY, "of an earlier answer"),
    Unused("detail", (PART,), ANY, "the model's processor sets the resolution"),
    Unused("logprobs", (PART,), ANY, "of an earlier answer"),
    Unused("provider_specific_fields", (MESSAGE, CALL), ANY, "of an earlier answer"),
    Unused("index", (CALL,), ANY, "of an earlier answer"),
    Unused("context_management", (MESSAGES,), ANY, "conversations are never shortened"),
    Unused("container", (MESSAGES,), (), "this server runs no code"),
    Unused("mcp_servers", (MESSAGES,), ([],), "this server calls no other servers"),
    Unused("citations", (PART,), ANY, "of an earlier answer"),
    Unused("caller", (PART,), ANY, "of an earlier answer"),
    Unused("eager_input_streaming", (TOOL,), ANY, "streams send calls whole"),
    Unused("cache_control", (MESSAGE, PART, TOOL, MESSAGES), ANY, "common prefixes of prompts are always shared"),
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
"""Field names of vLLM, sglang, llama.cpp and others, with the path of the same field here."""

REASONS = {unused.name: unused.reason for unused in UNUSED}
_HARMLESS = {(unused.name, place): unused.harmless for unused in UNUSED for place in unused.places}


def _is_harmless(place: str, name: str, value: Any) -> bool:
    """Return whether a field of this value is ignored."""
    if value is None:
        return True
    harmless = _HARMLESS.get((name, place), ())
    return harmless is ANY or any(value == one and type(value) is type(one) for one in harmless)


_MAX_FIELDS = 256
"""Fields of an object; pydantic reports each unknown one."""

T = TypeVar("T")

Many = Annotated[list[T], Field(max_length=4096, fail_fast=True)]
"""List that reports only the first invalid element: there may be thousands."""


class Fields(BaseModel):
    """Base of bodies and their parts: strict types, unknown fields are refused, `null` counts as absent.

    `place` of a subclass names its harmless fields in `UNUSED`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)
    _place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str = "") -> None:
        cls._place = place

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, values: Any) -> Any:
        if isinstance(values, dict):
            if len(values) > _MAX_FIELDS:
                raise ValueError(f"there are {len(values)} fields; send at most {_MAX_FIELDS}")
            return {name: value for name, value in values.items() if not _is_harmless(cls._place, name, value)}
        return values


def json_error_message(error: Exception) -> str:
    """Explain why a value cannot be parsed as JSON, or written as JSON."""
    message = str(error)
    if isinstance(error, RecursionError) or "depth" in message or "Circular" in message:
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, UnicodeEncodeError) or "surrogate" in message:  # tokenizers refuse it
        return "a text contains half of a surrogate pair, which is not a character"
    if "integer string conversion" in message:
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return message


class Body(Fields):
    """Base of whole request bodies: their strings are valid Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _check_strings(cls, values: Any) -> Any:
        try:
            to_json(values, fallback=lambda value: None)
        except ValueError as error:
            raise ValueError(json_error_message(error)) from None
        return values
