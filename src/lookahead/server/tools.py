"""How models write reasoning and calls of functions: a registry of formats, the grammar of each, and their reader."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lookahead.server.messages import FunctionTool
from lookahead.text import held_back

NAME = "NAME"
"""Where the name of the function stands in a format."""

_ID_LENGTH = 9
"""Letters and digits of the identifier of a call: the templates of Mistral take no other."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls. Arguments are a JSON object between `begin` and `end`.

    Attributes:
        name: What it is called.
        signs: Texts that a chat template has if its model writes calls like this.
        trigger: With what calls begin; a model that writes it writes calls.
        begin: Of a call, `trigger` left out where it is the beginning of all calls.
        end: Of a call.
        between: Between two calls.
        closing: Behind all of them. Without this and `between` there is one call.
        after_text: Whether there may be text before calls.
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
        """All that is written besides names and arguments."""
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
"""Of the first whose signs a chat template has all; `HERMES` where there is none."""


def format_of(template: str) -> ToolFormat | None:
    """How the model of a chat template writes calls; `None` if the template has no place for tools."""
    if "tools" not in template:
        return None
    return next((one for one in FORMATS if all(sign in template for sign in one.signs)), HERMES)


def call_rules(
    format_: ToolFormat, tools: Sequence[FunctionTool], special: Mapping[str, int], parallel: bool
) -> list[str]:
    """Rules of a grammar in Lark's form: `calls` is what follows the trigger, several calls if these may be `parallel`,
    in which `special` tokens of the model stand for themselves."""
    names = [f"call_{place}" for place in range(len(tools))]
    several = f"({literal(format_.between, special)} call)*" if parallel else ""
    rules = [f"calls: call {several} {literal(format_.closing, special)}", f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        schema = (tool.function.parameters or {"type": "object"}) | {"x-guidance": {"whitespace_flexible": False}}
        begin = literal(format_.begin.replace(NAME, tool.function.name), special)
        end = literal(format_.end, special)
        rules.append(f"{name}: {begin} %json {json.dumps(schema)} {end}")
    return rules


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar, which may be no text at all. Special tokens stand for themselves: no text matches them."""
    found = [token for token in special if token in text]
    parts = re.split("(" + "|".join(map(re.escape, found)) + ")", text) if found else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False) for part in parts if part
    )


def up_to(rule: str, mark: str, special: Mapping[str, int]) -> str:
    """A rule for any text up to a mark, and with it."""
    lazy = "" if any(mark.startswith(token) for token in special) else "[lazy]"
    return f"{rule}{lazy}: TEXT {literal(mark, special)}"


def read_calls(format_: ToolFormat, text: str) -> list[dict[str, Any]]:
    """The calls of an answer in OpenAI's form, up to the first that is not whole, with arguments as they were written;
    `text` is the answer from the trigger on."""
    calls, decoder = [], json.JSONDecoder(parse_int=str, parse_float=str)  # any number of digits
    begin = re.compile(re.escape(format_.begin).replace(NAME, "([a-zA-Z0-9_-]+)"))
    place = len(format_.trigger)
    while (found := begin.match(text, place)) is not None:
        try:
            _, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):  # cut off, or what no client would read
            break
        if not text.startswith(format_.end, end):
            break
        function = {"name": found[1], "arguments": text[found.end() : end]}
        identifier = secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
        calls.append({"id": identifier, "type": "function", "function": function})
        place = end + len(format_.end) + len(format_.between)
    return calls


@dataclass(frozen=True)
class ReasoningFormat:
    """How models write reasoning into their answer.

    Attributes:
        begin: Before it.
        end: Behind it.
        answer: Before the text that follows, if it is no call.
    """

    begin: str = "<think>"
    end: str = "</think>"
    answer: str = ""

    @property
    def marks(self) -> str:
        """All of them."""
        return self.begin + self.end + self.answer


TAGS = ReasoningFormat()
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
"""Of GPT-OSS, which writes into channels."""


class Thinking(Enum):
    """Whether a model reasons where its answer begins."""

    NEVER = "never"
    MAY = "may"
    """It may begin to."""
    BEGUN = "begun"
    """The prompt has begun its reasoning."""


def reasoning_of(template: str) -> ReasoningFormat:
    """How the model of a chat template writes reasoning."""
    return HARMONY if "<|channel|>analysis" in template else TAGS


def thinking_of(template: str, prompt: str) -> Thinking:
    """Whether a model reasons, by its chat template and the end of a prompt."""
    format_, prompt = reasoning_of(template), prompt.rstrip()
    if format_ is TAGS and (TAGS.end not in template or prompt.endswith(TAGS.end)):
        return Thinking.NEVER
    return Thinking.BEGUN if prompt.endswith(format_.begin) else Thinking.MAY


@dataclass
class Part:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""


class AnswerReader:
    """Tells reasoning and calls from text.

    Args:
        thinking: Whether the model reasons where the answer begins.
        format_: How the model writes calls, if it may call anything.
        reasoning: How it writes reasoning.
    """

    def __init__(self, thinking: Thinking, format_: ToolFormat | None, reasoning: ReasoningFormat = TAGS) -> None:
        self._thinking, self._format, self._reasoning = thinking, format_, reasoning
        self._text = ""
        self._emitted = Part()

    def add(self, piece: str) -> Part:
        """Add a piece of the answer; what is certain by now and was not told yet."""
        self._text += piece
        reasoning, content, _ = self._split(last=False)
        return self._news(reasoning, content)

    def finish(self) -> tuple[Part, list[dict[str, Any]]]:
        """What is left, and the calls in OpenAI's form. What is no whole call stays text."""
        reasoning, content, rest = self._split(last=True)
        calls = [] if self._format is None else read_calls(self._format, rest)
        return self._news(reasoning, content if calls else content + rest), calls

    def _news(self, reasoning: str, content: str) -> Part:
        news = Part(reasoning[len(self._emitted.reasoning) :], content[len(self._emitted.content) :])
        self._emitted = Part(reasoning, content)
        return news

    def _split(self, last: bool) -> tuple[str, str, str]:
        """Reasoning, text, and what stands where calls are or may be, of the answer so far. What more text may change
        is left out, unless there will be none."""
        marks, text, thinking, reasoning = self._reasoning, self._text, self._thinking, ""
        while thinking is not Thinking.NEVER:
            if thinking is Thinking.MAY:
                begin = text.lstrip()
                if not begin.startswith(marks.begin):
                    if marks.begin.startswith(begin) and not last:
                        return reasoning, "", ""
                    break
                text = begin[len(marks.begin) :]
            thought, found, rest = text.partition(marks.end)
            if not found:
                held = 0 if last else held_back(text, [marks.end])
                return reasoning + text[: len(text) - held], "", ""
            reasoning, text = reasoning + thought, rest.lstrip("\n")
            thinking = Thinking.MAY if marks.answer else Thinking.NEVER  # channels may follow one another
        if marks.answer and marks.answer.startswith(text) and not last:
            return reasoning, "", ""
        text = text.removeprefix(marks.answer)
        end = self._end_of_text(text, last)
        return reasoning, text[:end], text[end:]

    def _end_of_text(self, text: str, last: bool) -> int:
        """Where calls begin in what follows reasoning, or may begin."""
        if self._format is None:
            return len(text)
        trigger = self._format.trigger
        if not self._format.after_text:
            begins = text.startswith(trigger) or (trigger.startswith(text) and not last)
            return 0 if begins else len(text)
        place = text.find(trigger)
        if place < 0:
            place = len(text) - (0 if last else held_back(text, [trigger]))
        return place
