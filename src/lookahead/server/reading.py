"""Reading an answer as it comes: reasoning, text, calls of functions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from lookahead.server.text_builder import held_back
from lookahead.server.tools import ToolFormat, read_calls

THINK, THOUGHT = "<think>", "</think>"
"""Around the reasoning of models that write it into their answer."""


class Thinking(Enum):
    """Whether a model reasons where its answer begins."""

    NEVER = "never"
    MAY = "may"
    """It may begin to."""
    BEGUN = "begun"
    """The prompt has begun its reasoning."""


def thinking_of(template: str, prompt: str) -> Thinking:
    """Whether a model reasons, by its chat template and the end of a prompt."""
    if THOUGHT not in template or prompt.rstrip().endswith(THOUGHT):
        return Thinking.NEVER
    return Thinking.BEGUN if prompt.rstrip().endswith(THINK) else Thinking.MAY


@dataclass
class Part:
    """What is new of an answer.

    Attributes:
        reasoning: Reasoning.
        content: Text, `None` for what stands where calls are.
    """

    reasoning: str = ""
    content: str = ""


class AnswerReader:
    """Tells reasoning and calls from text.

    Args:
        thinking: Whether the model reasons where the answer begins.
        format_: How the model writes calls, if it may call anything.
    """

    def __init__(self, thinking: Thinking, format_: ToolFormat | None) -> None:
        self._thinking, self._format = thinking, format_
        self._text = ""  # what was not told yet
        self._told = False  # whether text was
        self._gap = False  # behind reasoning, before any text

    def add(self, piece: str) -> Part:
        """Add a piece of the answer; what is certain by now."""
        self._text += piece
        return self._take(last=False)

    def finish(self) -> tuple[Part, list[dict[str, Any]]]:
        """What is left, and the calls in OpenAI's form. What is no whole call stays text."""
        part = self._take(last=True)
        calls = [] if self._format is None else read_calls(self._format, self._text)
        if not calls:
            part.content += self._text
        return part, calls

    def _take(self, last: bool) -> Part:
        part = Part()
        if self._thinking is Thinking.MAY:
            begin = self._text.lstrip()
            if begin.startswith(THINK):
                self._text, self._thinking = begin[len(THINK) :], Thinking.BEGUN
            elif last or not THINK.startswith(begin):
                self._thinking = Thinking.NEVER
        if self._thinking is Thinking.BEGUN:
            reasoning, found, rest = self._text.partition(THOUGHT)
            if found:
                part.reasoning, self._text = reasoning, rest
                self._thinking, self._gap = Thinking.NEVER, True
            else:
                part.reasoning = self._cut(0 if last else held_back(self._text, [THOUGHT]))
        if self._gap:
            self._text = self._text.lstrip("\n")
            self._gap = not self._text
        if self._thinking is Thinking.NEVER:
            part.content = self._cut(self._after_text(last))
            self._told = self._told or bool(part.content)
        return part

    def _after_text(self, last: bool) -> int:
        """How many characters at the end are calls, or may be."""
        if self._format is None:
            return 0
        trigger = self._format.trigger
        if not self._format.after_text:
            begins = not self._told and (
                self._text.startswith(trigger) or (not last and trigger.startswith(self._text))
            )
            return len(self._text) if begins else 0
        begin = self._text.find(trigger)
        if begin >= 0:
            return len(self._text) - begin
        return 0 if last else held_back(self._text, [trigger])

    def _cut(self, kept: int) -> str:
        """All but so many characters at the end, which stay."""
        end = len(self._text) - kept
        cut, self._text = self._text[:end], self._text[end:]
        return cut
