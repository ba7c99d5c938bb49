"""Which grammar the answers to a request follow.

An answer is text, or what `response_format` and `structured_outputs` ask for, or calls of functions; reasoning may come
before it. One grammar says so: `start` of the first part, in which `@body` is the form that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from lookahead.server.errors import refused
from lookahead.server.grammar import compact
from lookahead.server.reading import THINK, THOUGHT, Thinking
from lookahead.server.requests import (
    ChatRequest,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    StructuredOutputs,
    TextRequest,
)
from lookahead.server.tools import ToolFormat, call_rules, literal, up_to


def grammar_of(
    request: TextRequest, thinking: Thinking, format_: ToolFormat | None, special: Mapping[str, int]
) -> tuple[str, str] | None:
    """The grammar of the answers, and the field that asks for it; `None` for any text.

    Args:
        request: The request.
        thinking: Whether the model may reason before its answer.
        format_: How it writes calls.
        special: Its special tokens.

    Raises:
        ApiError: What is asked for cannot be read, or does not go together.
    """
    body = _body(request)
    tools = callable_tools(request) if isinstance(request, ChatRequest) else []
    if not tools or format_ is None:
        if body is None:
            return None
        rules = ["start: @body"]
    else:
        assert isinstance(request, ChatRequest)
        try:
            rules = _answer_rules(request, tools, format_, special, body is not None)
        except (ValueError, TypeError, RecursionError) as error:
            raise refused("tools", f"tools: the parameters cannot be read: {error}") from error
    rules = ["%llguidance {}", *_thinking_rules(thinking, rules, special), "TEXT: /(.|\\n)*/"]
    parts: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": "\n".join(rules)}]
    if body is not None:
        parts.append(body[0] | {"name": "body"})
    try:
        return json.dumps({"grammars": parts}), "tools" if body is None else body[1]
    except RecursionError as error:
        raise refused("tools" if body is None else body[1], "the schema is nested too deep") from error


def _answer_rules(
    request: ChatRequest,
    tools: Sequence[FunctionTool],
    format_: ToolFormat,
    special: Mapping[str, int],
    has_body: bool,
) -> list[str]:
    named = isinstance(request.tool_choice, NamedTool)
    rules = call_rules(format_, tools, special, request.parallel_tool_calls is not False and not named)
    trigger = literal(format_.trigger, special)
    if named or request.tool_choice == "required":
        return [f"start: {trigger} calls", *rules]
    if has_body and not format_.after_text:
        raise refused("tools", "tools of this model do not go with another form of answers: its calls begin like JSON")
    if has_body:
        return [f"start: {trigger} calls | @body", *rules]
    if format_.after_text:
        return ["start: TEXT | trigger calls", up_to("trigger", format_.trigger, special), *rules]
    # What begins like a call is one; no other text begins with its first character.
    return [f"start: {trigger} calls | /([^{format_.trigger[0]}](.|\\n)*)?/", *rules]


def _thinking_rules(thinking: Thinking, rules: list[str], special: Mapping[str, int]) -> list[str]:
    if thinking is Thinking.NEVER:
        return rules
    answer = rules[0].replace("start:", "answer:", 1)
    thought = up_to("thought", THOUGHT, special)
    gap = "gap: /\\n{0,2}/"
    if thinking is Thinking.BEGUN:
        return ["start: thought gap answer", thought, gap, answer, *rules[1:]]
    return [f"start: ({literal(THINK, special)} thought gap)? answer", thought, gap, answer, *rules[1:]]


def _body(request: TextRequest) -> tuple[dict[str, Any], str] | None:
    """The form of a text as a part of a grammar, and the field that asks for it."""
    asked = request.response_format if isinstance(request, ChatRequest) else None
    structured = request.structured_outputs
    body: dict[str, Any] | None = None
    if isinstance(asked, JsonObjectFormat):
        body = {"json_schema": compact({"type": "object"})}
    elif isinstance(asked, JsonSchemaFormat):
        body = {"json_schema": compact(asked.json_schema.schema_)}
    if structured is None:
        return None if body is None else (body, "response_format")
    if body is not None:
        raise refused("structured_outputs", "structured_outputs does not go with response_format; leave one out")
    try:
        return _structured(structured), "structured_outputs"
    except Exception as error:  # of the reader of GBNF, which raises what it likes
        raise refused("structured_outputs", f"structured_outputs cannot be read: {error}") from error


def _structured(asked: StructuredOutputs) -> dict[str, Any]:
    if asked.regex is not None:
        grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(asked.regex))["grammars"][0]
        return grammar
    if asked.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in asked.choice)}
    if asked.grammar is not None:
        return {"lark_grammar": any_to_lark(asked.grammar)}
    if asked.json_object:
        return {"json_schema": compact({"type": "object"})}
    schema = json.loads(asked.json_) if isinstance(asked.json_, str) else asked.json_
    if not isinstance(schema, dict):
        raise ValueError("json is no JSON schema")
    return {"json_schema": compact(schema)}


def callable_tools(request: ChatRequest) -> Sequence[FunctionTool]:
    """The functions that an answer may call.

    Raises:
        ApiError: `tool_choice` does not go with `tools`.
    """
    choice = request.tool_choice
    if not request.tools and choice not in (None, "none", "auto"):
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
