"""Which grammar the answers to a request follow."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.server.errors import refused
from lookahead.server.grammar import json_grammar
from lookahead.server.requests import (
    ChatRequest,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
)
from lookahead.server.tools import tool_grammar


def grammar_of(request: ChatRequest) -> tuple[str, str] | None:
    """The grammar of the answers, and the field that asks for it; `None` for any text.

    Raises:
        ApiError: What is asked for does not go together.
    """
    tools = callable_tools(request)
    asked = format_grammar(request.response_format)
    if not tools:
        return None if asked is None else (asked, "response_format")
    if asked is not None:
        raise refused("response_format", "response_format does not go with tools that may be called; leave one out")
    required = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    try:
        return tool_grammar(tools, required, parallel), "tools"
    except (ValueError, TypeError, RecursionError) as error:
        raise refused("tools", f"tools: the parameters cannot be read: {error}") from error


def callable_tools(request: ChatRequest) -> Sequence[FunctionTool]:
    """The functions that an answer may call.

    Raises:
        ApiError: `tool_choice` does not go with `tools`.
    """
    choice = request.tool_choice
    if not request.tools and request.parallel_tool_calls is not None:
        raise refused("parallel_tool_calls", "parallel_tool_calls needs tools")
    if not request.tools and choice not in (None, "none"):
        raise refused("tool_choice", "tool_choice needs tools")
    if len({tool.function.name for tool in request.tools}) < len(request.tools):
        raise refused("tools", "tools has two functions of one name")
    if choice == "none":
        return []
    if not isinstance(choice, NamedTool):
        return request.tools
    chosen = [tool for tool in request.tools if tool.function.name == choice.function.name]
    if not chosen:
        raise refused("tool_choice", f"tool_choice names {choice.function.name!r}, which is none of the tools")
    return chosen


def format_grammar(asked: ResponseFormat | None) -> str | None:
    """The grammar that a format asks for, if it asks for one."""
    if isinstance(asked, JsonObjectFormat):
        return json_grammar({"type": "object"})
    if isinstance(asked, JsonSchemaFormat):
        return json_grammar(asked.json_schema.schema_)
    return None
