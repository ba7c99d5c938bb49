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

_MAX_CHARACTERS = 100
"""Characters of a client's own text that an error repeats."""

FAILED = 500

CLIENT_CLOSED_REQUEST = 499
"""Status in the log if the client disconnects before its answer, as in nginx."""

CLOSE = {"Connection": "close"}
"""Header of an error that also ends the connection."""


class ApiError(HTTPException):
    """Error response.

    Args:
        status: HTTP status.
        message: Cause and remedy.
        param: Invalid field of the request, if the error is about one.
        code: Machine-readable cause, e.g. `"model_not_found"`.
        headers: Further headers of the response.
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
        """Return the same error with `param` renamed by `names`, in its message too."""
        name = names.get(self.param or "", self.param)
        message = self.detail
        if self.param is not None and name is not None and message.startswith(self.param):
            message = name + message[len(self.param) :]
        return ApiError(self.status_code, message, name, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= FAILED else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def refused(param: str, message: str) -> ApiError:
    """Return the error (status 400) for an unsupported value of a field."""
    return ApiError(400, message, param, "unsupported_value")


def as_api_error(error: Exception, content_type: str = "") -> ApiError:
    """Convert any exception to an error response; errors of this library mean an invalid request.

    Args:
        content_type: The `Content-Type` header of the request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        is_not_json = isinstance(error.body, bytes) or not content_type
        return _not_json(content_type) if is_not_json else validation_error(list(error.errors()), error.body)
    if isinstance(error, ModelChangedError):
        return ApiError(503, str(error), None, "model_changed")
    if isinstance(error, LookaheadError):
        return ApiError(400, str(error), None, "invalid_value")
    return ApiError(FAILED, "the server failed; its log says why")


def error_summary(error: BaseException) -> str:
    """Return class, message and source line of an error, for the log."""
    place = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__module__}.{type(error).__qualname__}: {error!s:.200} ({place.filename}:{place.lineno})"


def _not_json(content_type: str) -> ApiError:
    """Return the error for a body of another type, which curl sends with `-d`."""
    sent = f"as {content_type[:_MAX_CHARACTERS]!r}" if content_type else "without the header Content-Type"
    return ApiError(
        415,
        f"the body is sent {sent}; send JSON with the header 'Content-Type: application/json' (curl: -H or --json)",
        code="unsupported_media_type",
    )


def validation_error(details: list[dict[str, Any]], body: Any) -> ApiError:
    """Return the error for the first invalid field of a body.

    Args:
        details: The errors that pydantic found.
        body: The parsed body.
    """
    field = details[0]["loc"][:2]
    # Each alternative of a union reports an error: the deepest one belongs to the intended alternative.
    detail = max((one for one in details if one["loc"][:2] == field), key=lambda one: len(one["loc"]))
    path = _path(detail["loc"][1:], body)
    param = ".".join(path)[:_MAX_CHARACTERS] or None
    if detail["type"] == "extra_forbidden":
        reason = REASONS.get(path[-1])
        message = f"{param} is not supported by this server" + (f": {reason}" if reason else "")
        return ApiError(400, message, param, "unsupported_parameter")
    if detail["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing", param, "missing_required_parameter")
    if detail["type"] == "json_invalid":
        message = f"the body is not valid JSON: {detail['ctx']['error']} at character {detail['loc'][-1]}"
        return ApiError(400, message, None, "invalid_json")
    subject = param or "the body"
    if param is not None and isinstance(detail["input"], (str, int, float)):
        subject += f"={detail['input']!r:.{_MAX_CHARACTERS}}"
    return ApiError(400, f"{subject}: {detail['msg'].removeprefix('Value error, ')}", param, "invalid_value")


def _path(parts: Sequence[Any], body: Any) -> list[str]:
    """Return the path of an invalid field, without the names of union alternatives that pydantic inserts."""
    path: list[str] = []
    for part in parts:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            path.append(str(part))
            body = body[part]
    is_missing = bool(parts) and isinstance(body, dict) and path[-1:] != [str(parts[-1])]
    return [*path, str(parts[-1])] if is_missing else path
