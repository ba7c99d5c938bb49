"""Calls of functions: the grammar that they follow, and finding them in an answer.

A call is written as `<tool_call>`, a JSON object with `name` and `arguments`, and `</tool_call>`, each on a line: the
form that many models are trained on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from llguidance import StructTag

from lookahead.server.requests import FunctionTool
from lookahead.server.text_builder import held_back

BEGIN, END = "<tool_call>", "</tool_call>"


def tool_grammar(tools: Sequence[FunctionTool], required: bool, parallel: bool) -> str:
    """The grammar of an answer that may call functions.

    Args:
        tools: The functions that it may call.
        required: It consists of calls; otherwise there may be text, and calls behind it.
        parallel: There may be several calls.
    """
    tags = [
        StructTag(
            trigger=BEGIN,
            begin=f'{BEGIN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": ',
            grammar=tool.function.schema_or_any | {"x-guidance": {"whitespace_flexible": False}},
            end=f"}}\n{END}",
        )
        for tool in tools
    ]
    if not required:
        grammar = str(StructTag.to_grammar(tags, assume_special=False))
        # Behind the only call there is no text, which might hold another one.
        return grammar if parallel else grammar.replace(")* tag_end", ") | tag_end", 1)
    calls = [
        f"call_{place}: {json.dumps(tag.begin)} %json {json.dumps(tag.grammar)} {json.dumps(tag.end)}"
        for place, tag in enumerate(tags)
    ]
    start = 'start: call ("\\n" call)*' if parallel else "start: call"
    choice = " | ".join(f"call_{place}" for place in range(len(tags)))
    return "\n".join(["%llguidance {}", start, f"call: {choice}", *calls])


class CallSplitter:
    """Tells calls from the text before them, as the answer comes."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = 0

    def add(self, piece: str) -> str:
        """Add a piece of the answer; the text that is surely before any call."""
        self._text += piece
        begin = self._text.find(BEGIN)
        end = len(self._text) - held_back(self._text, [BEGIN]) if begin < 0 else begin
        return self._show(end)

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The text that is left, and the calls in OpenAI's form. What is no whole call stays text."""
        begin = self._text.find(BEGIN)
        calls = [] if begin < 0 else _read_calls(self._text[begin:])
        return ("" if calls else self._show(len(self._text))), calls

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def _read_calls(text: str) -> list[dict[str, Any]]:
    calls, decoder = [], json.JSONDecoder()
    place = text.find(BEGIN)
    while place >= 0:
        start = place + len(BEGIN)
        start += len(text[start:]) - len(text[start:].lstrip())
        try:
            call, end = decoder.raw_decode(text, start)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        except (ValueError, KeyError, TypeError):  # cut off
            break
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        place = text.find(BEGIN, end)
    return calls
