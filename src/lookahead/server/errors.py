"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import extract_tb
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lookahead.errors import LookaheadError, ModelChangedError
from lookahead.server.fields import REASONS

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
        return _not_json(content_type) if sent_otherwise else of_validation(list(error.errors()), error.body)
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


def of_validation(details: list[dict[str, Any]], body: Any) -> ApiError:
    """What pydantic found in a body, of which the first is told."""
    field = details[0]["loc"][:2]
    # Of a union each alternative says why it is not meant: what got farthest is nearest to what was meant.
    found = max((detail for detail in details if detail["loc"][:2] == field), key=lambda detail: len(detail["loc"]))
    place = _place(found["loc"][1:], body)
    param = ".".join(place)[:_LONGEST_NAME] or None
    if found["type"] == "extra_forbidden":
        reason = REASONS.get(place[-1])
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
    return ApiError(400, f"{said}: {found['msg'].removeprefix('Value error, ')}", param, "invalid_value")


def _place(parts: Sequence[Any], body: Any) -> list[str]:
    """The place of an error in a body, without the alternatives of unions, which pydantic has as parts of it."""
    place: list[str] = []
    for part in parts:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            place.append(str(part))
            body = body[part]
    is_missing = bool(parts) and isinstance(body, dict) and place[-1:] != [str(parts[-1])]
    return [*place, str(parts[-1])] if is_missing else place
