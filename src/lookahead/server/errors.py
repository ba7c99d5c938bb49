"""Errors in the form of OpenAI's API, and the fields of requests that this server has no use for: those that ask for
nothing, and those that would change the answer and are refused.

What is used is declared in `requests`. Together they are the table of fields in `docs/server.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lookahead.errors import LookaheadError, ModelChangedError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_LONGEST_NAME = 100

FAILED = 500

CLIENT_LEFT = 499
"""In the log, for a client that has gone before its answer."""

CLOSE = {"Connection": "close"}
"""Header of an answer after which the connection is of no use."""


class ApiError(HTTPException):
    """What a client is told instead of an answer.

    Args:
        status: The HTTP status.
        message: What is wrong, and what to do.
        param: The field of the request that is to blame, if one is.
        code: A word for programs, such as `"model_not_found"`.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error, where the field to blame has the name that `names` gives it."""
        name = names.get(self.param or "", self.param)
        message = self.detail
        if self.param is not None and name is not None and message.startswith(self.param):
            message = name + message[len(self.param) :]
        return ApiError(self.status_code, message, name, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= FAILED else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def refused(param: str, message: str) -> ApiError:
    """A field that cannot be met: status 400."""
    return ApiError(400, message, param, "unsupported_value")


def as_api_error(error: Exception, content_type: str = "") -> ApiError:
    """Any error in the form that clients know: what the library refuses is the request's fault. `content_type` is what
    the request says that its body is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        sent_otherwise = isinstance(error.body, bytes) or not content_type
        return _not_json(content_type) if sent_otherwise else of_validation(list(error.errors()))
    if isinstance(error, ModelChangedError):
        return ApiError(503, str(error), None, "model_changed")
    if isinstance(error, LookaheadError):
        return ApiError(400, str(error), None, "invalid_value")
    return ApiError(FAILED, "the server failed; its log says why")


def described(error: BaseException) -> str:
    """An error in a line of the log: its class, what it says, and where it was raised."""
    place = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__module__}.{type(error).__qualname__}: {error!s:.200} ({place.filename}:{place.lineno})"


def _not_json(content_type: str) -> ApiError:
    """A body that is not sent as JSON, as curl does with `-d` alone."""
    sent = f"as {content_type[:_LONGEST_NAME]!r}" if content_type else "without the header Content-Type"
    return ApiError(
        415,
        f"the body is sent {sent}; send JSON with the header 'Content-Type: application/json' (curl: -H or --json)",
        code="unsupported_media_type",
    )


def of_validation(details: list[dict[str, Any]]) -> ApiError:
    """What pydantic found, of which the first is told."""
    field = details[0]["loc"][:2]
    # Of a union each alternative says why it is not meant: what got farthest is nearest to what was meant.
    found = max((detail for detail in details if detail["loc"][:2] == field), key=lambda detail: len(detail["loc"]))
    place = [str(part) for part in found["loc"] if part != "body"]
    # A union's alternatives are parts of the place, too; they are no field of the request.
    param = ".".join(part for part in place if not _names_alternative(part))[:_LONGEST_NAME] or None
    if found["type"] == "extra_forbidden":
        reason = _REASONS.get(place[-1])
        said = f"{param} is not supported by this server" + (f": {reason}" if reason else "")
        return ApiError(400, said, param, "unsupported_parameter")
    if found["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing", param, "missing_required_parameter")
    if found["type"] == "json_invalid":
        said = f"the body is not valid JSON: {found['ctx']['error']} at character {found['loc'][-1]}"
        return ApiError(400, said, None, "invalid_json")
    said = param or "the body"
    if param is not None and isinstance(found["input"], (str, int, float)):
        said += f"={found['input']!r:.{_LONGEST_NAME}}"
    return ApiError(400, f"{said}: {found['msg']}", param, "invalid_value")


def _names_alternative(part: str) -> bool:
    return any(mark in part for mark in "[({") or part in ("str", "int", "float", "bool") or part[:1].isupper()


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
