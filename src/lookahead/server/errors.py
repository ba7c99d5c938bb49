"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookahead.errors import LookaheadError, ModelChangedError
from lookahead.server.fields import reason_against

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_LONGEST_NAME = 100

CLOSE = {"Connection": "close"}
"""Header of an answer after which the connection is of no use."""


class ApiError(Exception):
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
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error, where the field to blame has the name that `names` gives it."""
        name = names.get(self.param or "", self.param)
        message = self.message
        if self.param is not None and name is not None and message.startswith(self.param):
            message = name + message[len(self.param) :]
        return ApiError(self.status, message, name, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str) -> ApiError:
    """A field that cannot be met: status 400."""
    return ApiError(400, message, param, "unsupported_value")


def of_library(error: LookaheadError) -> ApiError:
    """What the library refuses, in the same form."""
    if isinstance(error, ModelChangedError):
        return ApiError(503, str(error), None, "model_changed")
    return ApiError(400, str(error), None, "invalid_value")


def not_json(content_type: str) -> ApiError:
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
        reason = reason_against(place[-1])
        said = f"{param} is not supported by this server" + (f": {reason}" if reason else "")
        return ApiError(400, said, param, "unsupported_parameter")
    if found["type"] in ("missing",):
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    if found["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", None, "invalid_json")
    return ApiError(400, f"{param or 'the body'}: {found['msg']}", param, "invalid_value")


def _names_alternative(part: str) -> bool:
    return any(mark in part for mark in "[({") or part in ("str", "int", "float", "bool") or part[:1].isupper()
