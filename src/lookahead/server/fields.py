"""Fields of requests that clients send and this server has no use for: those that ask for nothing, and those that would
change the answer and are refused.

What is used is declared in `requests`. Together they are the table of fields in `docs/server.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
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


_ALL = (CHAT, COMPLETIONS, RESPONSES)

UNUSED = (
    Unused("store", (CHAT, RESPONSES), ANY, "nothing is stored"),
    Unused("metadata", (CHAT, RESPONSES), ANY, "a note of the client"),
    Unused("service_tier", (CHAT, RESPONSES), ANY, "there is one tier"),
    Unused("prompt_cache_key", (CHAT, RESPONSES), ANY, "prompts that begin alike share their beginning anyway"),
    Unused("prompt_cache_retention", (CHAT, RESPONSES), ANY, "the cache is bounded by memory, not by time"),
    Unused("safety_identifier", (CHAT, RESPONSES), ANY, "a note of the client"),
    Unused("verbosity", (CHAT, FORMAT), ANY, "a hint that no model here was trained on"),
    Unused("include", (RESPONSES,), ANY, "names outputs of hosted tools, of which there are none"),
    Unused("max_tool_calls", (RESPONSES,), ANY, "bounds hosted tools, of which there are none"),
    Unused("truncation", (RESPONSES,), ("disabled", "auto"), "inputs are never cut; too long ones are refused"),
    Unused("background", (RESPONSES,), (False,), "answers are given at once, and not stored"),
    Unused("previous_response_id", (RESPONSES,), (), "answers are not stored; send the conversation in input"),
    Unused("conversation", (RESPONSES,), (), "conversations are not stored; send them in input"),
    Unused("prompt", (RESPONSES,), (), "prompt templates are not stored here"),
    Unused("modalities", (CHAT,), (["text"],), "answers are text"),
    Unused("audio", (CHAT,), (), "answers are text"),
    Unused("web_search_options", (CHAT,), (), "this server searches nothing"),
    Unused("functions", (CHAT,), ([],), "use tools"),
    Unused("function_call", (CHAT,), ("none",), "use tool_choice"),
    Unused("best_of", (COMPLETIONS,), (1,), "answers are not ranked; use n"),
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
    Unused("guided_json", _ALL, (), "use structured_outputs.json"),
    Unused("guided_regex", _ALL, (), "use structured_outputs.regex"),
    Unused("guided_choice", _ALL, (), "use structured_outputs.choice"),
    Unused("guided_grammar", _ALL, (), "use structured_outputs.grammar"),
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
    Unused("cache_control", (MESSAGE, PART, TOOL), ANY, "prompts that begin alike share their beginning anyway"),
    Unused("include_obfuscation", (STREAM,), ANY, "chunks are not padded"),
)

_REASONS = {unused.name: unused.reason for unused in UNUSED}
_HARMLESS = {(unused.name, place): unused.harmless for unused in UNUSED for place in unused.places}


def asks_for_nothing(place: str, name: str, value: Any) -> bool:
    """Whether a field that is not used may be left out without a change of the answer."""
    if value is None:
        return True
    harmless = _HARMLESS.get((name, place), ())
    return harmless is ANY or any(value == one and type(value) is type(one) for one in harmless)


def reason_against(name: str) -> str | None:
    """Why a field is refused, if there is more to say than that it is not known."""
    return _REASONS.get(name)


def unused_rows() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Name, places and what happens to each field that is not used."""
    for unused in UNUSED:
        if unused.harmless is ANY:
            said = f"asks for nothing: {unused.reason}"
        elif unused.harmless:
            values = " or ".join(f"`{_shown(value)}`" for value in unused.harmless)
            said = f"{values} asks for nothing, all else is refused: {unused.reason}"
        else:
            said = f"refused: {unused.reason}"
        yield unused.name, unused.places, said


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, "") if isinstance(value, bool) else repr(value).replace("'", '"')
