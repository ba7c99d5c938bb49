"""Formats of reasoning and of function calls: a registry, their grammars, and a parser."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lookahead.server.requests import FunctionTool
from lookahead.text import held_back

NAME = "NAME"
"""Placeholder for the name of the function in a format."""

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Layout of `json.dumps`, which templates write. With free white space a model could write it forever."""

_ID_LENGTH = 9
"""Characters of the identifier of a call; Mistral's templates require 9."""


@dataclass(frozen=True)
class ToolFormat:
    """Format of calls of a model family. Arguments are a JSON object between `begin` and `end`.

    Attributes:
        name: Name of the format.
        signs: Texts that identify the format in a chat template.
        trigger: Text that begins the calls of an answer.
        begin: Beginning of a call, after `trigger` for the first one.
        end: End of a call.
        between: Separator of two calls.
        closing: Text after the last call. Without it and `between`, an answer has one call.
        after_text: Whether text may precede calls.
    """

    name: str
    signs: tuple[str, ...]
    trigger: str
    begin: str
    end: str
    between: str = ""
    closing: str = ""
    after_text: bool = True

    @property
    def marks(self) -> str:
        """Joined fixed texts of the format."""
        return "".join((self.trigger, self.begin, self.end, self.between, self.closing))


HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    "<tool_call>",
    f'\n{{"name": "{NAME}", "arguments": ',
    "}\n</tool_call>",
    "\n<tool_call>",
)

FORMATS = (
    ToolFormat(
        "deepseek-v3",
        ("<｜tool▁sep｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek-v3.1",
        ("<｜tool▁sep｜>",),
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "harmony",
        ("<|channel|>commentary",),
        "<|channel|>commentary to=functions.",
        f"{NAME} <|constrain|>json<|message|>",
        "",
        after_text=False,
    ),
    ToolFormat("mistral-v11", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", f"{NAME}[ARGS]", "", "[TOOL_CALLS]"),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS][", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]"),
    HERMES,
    ToolFormat(
        "llama3",
        ('"parameters": dictionary of argument name',),
        '{"name": ',
        f'"{NAME}", "parameters": ',
        "}",
        '; {"name": ',
        after_text=False,
    ),
)
"""Formats in order of precedence."""


def format_of(template: str) -> ToolFormat | None:
    """Return the first format with all signs in a chat template, else `HERMES`; `None` without support for tools."""
    if "tools" not in template:
        return None
    return next((one for one in FORMATS if all(sign in template for sign in one.signs)), HERMES)


def call_rules(
    format_: ToolFormat, tools: Sequence[FunctionTool], special: Mapping[str, int], parallel: bool
) -> list[str]:
    """Return grammar rules in Lark's format; the rule `calls` matches the text after the trigger.

    Args:
        format_: Format of the calls.
        tools: Functions that may be called.
        special: Special tokens of the model, with their ids.
        parallel: Whether several calls may follow each other.
    """
    names = [f"call_{number}" for number in range(len(tools))]
    several = f"({literal(format_.between, special)} call)*" if parallel else ""
    rules = [f"calls: call {several} {literal(format_.closing, special)}", f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        schema = (tool.function.parameters or {"type": "object"}) | {"x-guidance": JSON_LAYOUT}
        begin = literal(format_.begin.replace(NAME, tool.function.name), special)
        end = literal(format_.end, special)
        rules.append(f"{name}: {begin} %json {json.dumps(schema)} {end}")
    return rules


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a grammar expression for a text, with special tokens by id: their text would not match them."""
    tokens = [token for token in special if token in text]
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False) for part in parts if part
    )


def up_to(rule: str, mark: str, special: Mapping[str, int]) -> str:
    """Return a grammar rule for any text that ends with `mark`."""
    lazy = "" if any(mark.startswith(token) for token in special) else "[lazy]"
    return f"{rule}{lazy}: TEXT {literal(mark, special)}"


def parse_calls(format_: ToolFormat, text: str) -> list[dict[str, Any]]:
    """Return the complete calls at the beginning of `text` in OpenAI's format; arguments keep their text.

    Args:
        format_: Format of the calls.
        text: The answer from the trigger on.
    """
    calls = []
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)  # permit any number of digits
    begin = re.compile(re.escape(format_.begin).replace(NAME, "([a-zA-Z0-9_-]+)"))
    start = len(format_.trigger)
    while (match := begin.match(text, start)) is not None:
        try:
            _, end = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):  # cut off, or invalid
            break
        if not text.startswith(format_.end, end):
            break
        function = {"name": match[1], "arguments": text[match.end() : end]}
        identifier = secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
        calls.append({"id": identifier, "type": "function", "function": function})
        start = end + len(format_.end) + len(format_.between)
    return calls


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of reasoning in an answer.

    Attributes:
        begin: Text before the reasoning.
        end: Text after the reasoning.
        answer: Text before an answer that is not a call.
    """

    begin: str = "<think>"
    end: str = "</think>"
    answer: str = ""

    @property
    def marks(self) -> str:
        """Joined fixed texts of the format."""
        return self.begin + self.end + self.answer


TAGS = ReasoningFormat()
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
"""Format of GPT-OSS, which writes into channels."""


class Thinking(Enum):
    """Reasoning at the beginning of an answer."""

    NEVER = "never"
    MAY = "may"
    """The answer may begin with reasoning."""
    OPEN = "open"
    """The prompt ends with the beginning of reasoning."""


def reasoning_of(template: str) -> ReasoningFormat:
    """Return the format of reasoning for a chat template."""
    return HARMONY if "<|channel|>analysis" in template else TAGS


def thinking_of(template: str, prompt: str) -> Thinking:
    """Return whether the answer begins with reasoning, from the chat template and the end of the prompt."""
    format_, prompt = reasoning_of(template), prompt.rstrip()
    if format_ is TAGS and (TAGS.end not in template or prompt.endswith(TAGS.end)):
        return Thinking.NEVER
    return Thinking.OPEN if prompt.endswith(format_.begin) else Thinking.MAY


@dataclass
class Part:
    """New reasoning and content of an answer."""

    reasoning: str = ""
    content: str = ""


class AnswerReader:
    """Incremental parser that separates reasoning, text and calls.

    Args:
        thinking: Reasoning at the beginning of the answer.
        format_: Format of calls; `None` if there are no tools.
        reasoning: Format of reasoning.
    """

    def __init__(self, thinking: Thinking, format_: ToolFormat | None, reasoning: ReasoningFormat = TAGS) -> None:
        self._thinking = thinking
        self._format = format_
        self._reasoning = reasoning
        self._is_plain = thinking is Thinking.NEVER and format_ is None and not reasoning.answer
        self._text = ""
        self._emitted = Part()

    def add(self, piece: str) -> Part:
        """Add a piece of the answer, and return the new text that later pieces cannot change."""
        if self._is_plain:
            return Part(content=piece)
        self._text += piece
        reasoning, content, _ = self._split(last=False)
        return self._news(reasoning, content)

    def finish(self) -> tuple[Part, list[dict[str, Any]]]:
        """Return the remaining text, and the calls in OpenAI's format. Incomplete calls become text."""
        reasoning, content, rest = self._split(last=True)
        calls = [] if self._format is None else parse_calls(self._format, rest)
        return self._news(reasoning, content if calls else content + rest), calls

    def _news(self, reasoning: str, content: str) -> Part:
        news = Part(reasoning[len(self._emitted.reasoning) :], content[len(self._emitted.content) :])
        self._emitted = Part(reasoning, content)
        return news

    def _split(self, last: bool) -> tuple[str, str, str]:
        """Split the answer so far into reasoning, text and calls; unless `last`, without text that may still change."""
        marks, text, thinking = self._reasoning, self._text, self._thinking
        reasoning = ""
        while thinking is not Thinking.NEVER:
            if thinking is Thinking.MAY:
                begin = text.lstrip()
                if not begin.startswith(marks.begin):
                    if marks.begin.startswith(begin) and not last:
                        return reasoning, "", ""
                    break
                text = begin[len(marks.begin) :]
            thought, end_mark, rest = text.partition(marks.end)
            if not end_mark:
                uncertain = 0 if last else held_back(text, [marks.end])
                return reasoning + text[: len(text) - uncertain], "", ""
            reasoning, text = reasoning + thought, rest.lstrip("\n")
            thinking = Thinking.MAY if marks.answer else Thinking.NEVER  # channels may follow one another
        if marks.answer and marks.answer.startswith(text) and not last:
            return reasoning, "", ""
        text = text.removeprefix(marks.answer)
        end = self._end_of_text(text, last)
        return reasoning, text[:end], text[end:]

    def _end_of_text(self, text: str, last: bool) -> int:
        """Return the index of the first call in `text`, or of a possible beginning of one."""
        if self._format is None:
            return len(text)
        trigger = self._format.trigger
        if not self._format.after_text:
            begins = text.startswith(trigger) or (trigger.startswith(text) and not last)
            return 0 if begins else len(text)
        index = text.find(trigger)
        if index < 0:
            index = len(text) - (0 if last else held_back(text, [trigger]))
        return index
